"""Grouped product as a loop over as many row tiles as are in use.

A tile may reach past its group's end: the rows it spoils belong to later groups, which are written later.
"""

import jax
import jax.numpy as jnp

TILE_ROWS = 128


@jax.custom_vjp
def grouped_matmul(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x_RD must be zero in rows after the last group."""
    rows, tile = x_RD.shape[0], _tile(x_RD)
    x_RD = jnp.pad(x_RD, ((0, tile), (0, 0)))

    def step(y_RF, row, group, _):
        y_tile = jax.lax.dynamic_slice_in_dim(x_RD, row, tile) @ w_EDF[group]
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_tile, row, 0)

    # Products with zeros give an accumulator that varies over the same mesh axes as the result.
    empty_RF = jnp.zeros((rows + tile, w_EDF.shape[2]), x_RD.dtype) + 0 * (x_RD[0, 0] * w_EDF[0, 0, 0])
    y_RF = _for_each_tile(step, empty_RF, sizes_E, tile)[:rows]
    return jnp.where((jnp.arange(rows) < sizes_E.sum())[:, None], y_RF, 0)


def _forward(x_RD, w_EDF, sizes_E):
    return grouped_matmul(x_RD, w_EDF, sizes_E), (x_RD, w_EDF, sizes_E)


def _backward(saved, g_RF):
    x_RD, w_EDF, sizes_E = saved
    g_RF = jnp.where((jnp.arange(g_RF.shape[0]) < sizes_E.sum())[:, None], g_RF, 0)
    gx_RD = grouped_matmul(g_RF, w_EDF.swapaxes(1, 2), sizes_E)
    return gx_RD, _weight_gradient(x_RD, g_RF, sizes_E, w_EDF), None


grouped_matmul.defvjp(_forward, _backward)


def _weight_gradient(x_RD, g_RF, sizes_E, w_EDF):
    tile = _tile(x_RD)
    x_RD, g_RF = (jnp.pad(a, ((0, tile), (0, 0))) for a in (x_RD, g_RF))

    def step(gw_EDF, row, group, end):
        inside = (row + jnp.arange(tile) < end)[:, None]
        x_tile = jnp.where(inside, jax.lax.dynamic_slice_in_dim(x_RD, row, tile), 0)
        part_DF = x_tile.T @ jax.lax.dynamic_slice_in_dim(g_RF, row, tile)
        return gw_EDF.at[group].set(gw_EDF[group] + part_DF)

    wide = jnp.promote_types(w_EDF.dtype, jnp.float32)
    empty_EDF = jnp.zeros(w_EDF.shape, wide) + 0 * (x_RD[0, 0] * w_EDF[0, 0, 0])
    return _for_each_tile(step, empty_EDF.astype(wide), sizes_E, tile).astype(w_EDF.dtype)


def _tile(x_RD) -> int:
    return min(TILE_ROWS, x_RD.shape[0])


def _for_each_tile(step, carry, sizes_E, tile: int):
    """carry = step(carry, first row, group, the group's end) over the tiles in use, in row order."""
    ends_E, tiles_E = jnp.cumsum(sizes_E), -(-sizes_E // tile)
    last_E = jnp.cumsum(tiles_E)

    def body(i, carry):
        group = (i >= last_E).sum()
        row = ends_E[group] - sizes_E[group] + (i - last_E[group] + tiles_E[group]) * tile
        return step(carry, row, group, ends_E[group])

    return jax.lax.fori_loop(0, last_E[-1], body, carry)
