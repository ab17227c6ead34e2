"""XLA's collectives. n is the group's size; bytes are those that one device sends for an operand of b bytes."""

import jax

from ..compat import varying_axes
from ..types import Axes


def group_size(axes: Axes) -> int:
    """Devices of the group."""
    return jax.lax.axis_size(axes) if axes else 1


def all_to_all(x: jax.Array, axes: Axes, split_dim: int = 0, concat_dim: int = 0) -> jax.Array:
    """Split `split_dim` over the group, concatenate what arrives along `concat_dim`. Sends b (n-1)/n bytes."""
    return jax.lax.all_to_all(x, axes, split_dim, concat_dim, tiled=True) if axes else x


def all_gather(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    """Concatenate the group's operands along `dim`. Sends b (n-1) bytes. Its transpose is `reduce_scatter`."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    """Sum over the group, keep this device's part of `dim`. Sends b (n-1)/n bytes."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def own_part(x: jax.Array, axes: Axes, dim: int = 0) -> jax.Array:
    """This device's part of `dim` of what is whole on each device of the group. Sends nothing."""
    if not axes:
        return x
    size = x.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def psum(x, axes: Axes):
    """Sum over the group, the same on every device."""
    return jax.lax.psum(x, axes) if axes else x


def pmax(x, axes: Axes):
    """Maximum over the group, the same on every device. Axes over which x is already the same are left out."""
    axes = tuple(a for a in axes if a in varying_axes(x))
    return jax.lax.pmax(x, axes) if axes else x
