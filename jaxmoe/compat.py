"""Every difference between the supported versions of JAX, and accessors that may move."""

import jax

from .types import Axes


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which x may differ, inside shard_map with check_vma=True."""
    return frozenset(jax.typeof(x).mat.varying)


def vary_like(x, other: jax.Array):
    """x marked as varying over the axes that `other` varies over, too. Its transpose is the sum over them."""

    def cast(leaf):
        missing: Axes = tuple(sorted(varying_axes(other) - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def vary_over(x, axes: Axes):
    """x marked as varying over axes, too. Its transpose is the sum over them."""

    def cast(leaf):
        missing = tuple(a for a in axes if a not in varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x)
