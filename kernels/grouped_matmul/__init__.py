"""Rows of group g times matrix g: rows are sorted by group, sizes are known only at run time."""

import jax
import jax.numpy as jnp

from .ref import grouped_matmul as reference
from .tiled import grouped_matmul as _tiled

__all__ = ["grouped_matmul", "reference"]


def grouped_matmul(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """y_RF with y[r] = x[r] @ w[group of r], zero in rows after the last group.

    x_RD: rows sorted by group, sum(sizes_E) <= R; what later rows hold does not matter. Work is proportional to the
    rows in use, rounded up to a tile per group. On GPU this is jax.lax.ragged_dot, which XLA has a kernel for;
    elsewhere a loop over tiles, because XLA:CPU's ragged_dot multiplies every row by every matrix.
    Inside shard_map, w must vary over every mesh axis that x varies over.
    """
    if x_RD.shape[1] != w_EDF.shape[1] or sizes_E.shape != w_EDF.shape[:1]:
        raise ValueError(
            f"x [R, D], w [E, D, F] and sizes [E] must agree, got {x_RD.shape}, {w_EDF.shape} and {sizes_E.shape}"
        )
    if jax.default_backend() == "gpu":
        used_R1 = (jnp.arange(x_RD.shape[0]) < sizes_E.sum())[:, None]
        return jnp.where(used_R1, jax.lax.ragged_dot(jnp.where(used_R1, x_RD, 0), w_EDF, sizes_E), 0)
    return _tiled(x_RD, w_EDF, sizes_E)
