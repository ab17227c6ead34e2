"""Rows of group g times matrices g: rows are sorted by group, sizes are known only at run time."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from . import tiled
from .ref import grouped_matmul as reference
from .tiled import Product, Stage

__all__ = ["Product", "Stage", "grouped_matmul", "grouped_stages", "reference"]


def grouped_matmul(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """y_RF with y[r] = x[r] @ w[group of r], zero in rows after the last group; see `grouped_stages`."""
    if x_RD.shape[1] != w_EDF.shape[1] or sizes_E.shape != w_EDF.shape[:1]:
        raise ValueError(
            f"x [R, D], w [E, D, F] and sizes [E] must agree, got {x_RD.shape}, {w_EDF.shape} and {sizes_E.shape}"
        )
    return grouped_stages((_product,), x_RD, w_EDF, sizes_E)


def _product(x_RD: jax.Array, w_DF: jax.Array, product: Product) -> jax.Array:
    return product(x_RD, w_DF)


def grouped_stages(stages: Sequence[Stage], x, w, sizes_E: jax.Array):
    """Of every row r of group g, stages one after the other: stage(rows, w[g], product), with product for products with
    w's matrices, and nothing in which rows meet. Zero in rows after the last group.

    x: arrays of rows [R, ...] sorted by group, sum(sizes_E) <= R; what later rows hold does not matter. w: arrays with
    a leading dim over groups. Work is proportional to the rows in use, rounded up to a tile per group. On GPU, products
    are jax.lax.ragged_dot, which XLA has a kernel for; elsewhere there is a loop over tiles, because XLA:CPU's
    ragged_dot multiplies every row by every matrix. Inside shard_map, w must vary over every mesh axis that x varies
    over.
    """
    if jax.default_backend() != "gpu":
        return tiled.grouped_stages(stages, x, w, sizes_E)
    used_R = jnp.arange(jax.tree.leaves(x)[0].shape[0]) < sizes_E.sum()

    def used(values):
        return jax.tree.map(lambda a: jnp.where(used_R[:, None], a, 0), values)

    def product(x_RD, w_EDF):
        return jax.lax.ragged_dot(x_RD, w_EDF, sizes_E)

    value = used(x)
    for stage in stages:
        value = used(stage(value, w, product))
    return value
