"""Grouped product as a loop over as many row tiles as are in use.

Full tiles first, then what is left of each group in small ones. A small tile may reach past its group's end, so it is
merged into what is there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

TILE_ROWS = 256
SMALL_TILE_ROWS = 32


@jax.custom_vjp
def grouped_matmul(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows after the last group are zero in the result, whatever x_RD holds there."""
    rows = x_RD.shape[0]
    x_RD = jnp.pad(x_RD, ((0, SMALL_TILE_ROWS), (0, 0)))

    def full(y_RF, row, group, end, tile):
        y_tile = jax.lax.dynamic_slice_in_dim(x_RD, row, tile) @ w_EDF[group]
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_tile, row, 0)

    def partial(y_RF, row, group, end, tile):
        y_tile = jax.lax.dynamic_slice_in_dim(x_RD, row, tile) @ w_EDF[group]
        inside = (row + jnp.arange(tile) < end)[:, None]
        y_tile = jnp.where(inside, y_tile, jax.lax.dynamic_slice_in_dim(y_RF, row, tile))
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_tile, row, 0)

    zeros_RF = _zeros((rows + SMALL_TILE_ROWS, w_EDF.shape[2]), x_RD.dtype, x_RD, w_EDF)
    return _over_tiles(full, partial, zeros_RF, sizes_E, rows)[:rows]


def _forward(x_RD, w_EDF, sizes_E):
    return grouped_matmul(x_RD, w_EDF, sizes_E), (x_RD, w_EDF, sizes_E)


def _backward(saved, g_RF):
    x_RD, w_EDF, sizes_E = saved
    gx_RD = grouped_matmul(g_RF, w_EDF.swapaxes(1, 2), sizes_E)
    return gx_RD, _weight_gradient(x_RD, g_RF, sizes_E, w_EDF), None


grouped_matmul.defvjp(_forward, _backward)


def _weight_gradient(x_RD, g_RF, sizes_E, w_EDF):
    rows = x_RD.shape[0]
    x_RD, g_RF = (jnp.pad(a, ((0, SMALL_TILE_ROWS), (0, 0))) for a in (x_RD, g_RF))
    wide = jnp.promote_types(w_EDF.dtype, jnp.float32)

    def add(gw_EDF, group, x_tile, g_tile):
        part_DF = jax.lax.dot_general(x_tile, g_tile, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return gw_EDF.at[group].set(gw_EDF[group] + part_DF)

    def full(gw_EDF, row, group, end, tile):
        return add(gw_EDF, group, *(jax.lax.dynamic_slice_in_dim(a, row, tile) for a in (x_RD, g_RF)))

    def partial(gw_EDF, row, group, end, tile):
        inside = (row + jnp.arange(tile) < end)[:, None]
        tiles = (jax.lax.dynamic_slice_in_dim(a, row, tile) for a in (x_RD, g_RF))
        return add(gw_EDF, group, *(jnp.where(inside, a, 0) for a in tiles))

    zeros_EDF = _zeros(w_EDF.shape, wide, x_RD, w_EDF)
    return _over_tiles(full, partial, zeros_EDF, sizes_E, rows).astype(w_EDF.dtype)


def _zeros(shape: tuple[int, ...], dtype, *like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that all of `like` vary over, as a loop's carry must inside shard_map."""
    zero = sum(0 * jnp.isnan(a[(0,) * a.ndim]).astype(jnp.int32) for a in like)
    return jnp.zeros(shape, dtype) + jnp.asarray(zero, dtype)


def _over_tiles(full: Callable, partial: Callable, carry, sizes_E, rows: int):
    """carry = step(carry, first row, group, the group's end, rows of a tile) over the tiles in use."""
    ends_E = jnp.cumsum(sizes_E)
    starts_E = ends_E - sizes_E
    if rows >= TILE_ROWS:
        tiles_E = sizes_E // TILE_ROWS
        carry = _loop(full, carry, starts_E, ends_E, tiles_E, TILE_ROWS)
        starts_E = starts_E + tiles_E * TILE_ROWS
    return _loop(partial, carry, starts_E, ends_E, -(-(ends_E - starts_E) // SMALL_TILE_ROWS), SMALL_TILE_ROWS)


def _loop(step: Callable, carry, starts_E, ends_E, tiles_E, tile: int):
    last_E = jnp.cumsum(tiles_E)

    def body(i, carry):
        group = (i >= last_E).sum()
        row = starts_E[group] + (i - last_E[group] + tiles_E[group]) * tile
        return step(carry, row, group, ends_E[group], tile)

    return jax.lax.fori_loop(0, last_E[-1], body, carry)
