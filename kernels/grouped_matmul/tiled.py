"""Grouped product as a loop over as many row tiles as are in use.

Full tiles first. What is left of each group is one tile more, of the smallest of a few sizes that holds it; rows of
other groups that it reaches are masked.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

TILE_ROWS = 256
REST_ROWS = (64, 128, 192, 256)   # each size is one more product to compile, and wastes less


@jax.custom_vjp
def grouped_matmul(x_RD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Rows after the last group are zero in the result, whatever x_RD holds there."""

    def full(y_RF, row, group, tile):
        y_tile = _rows(x_RD, row, tile) @ w_EDF[group]
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_tile, row, 0)

    def rest(y_RF, row, group, tile, inside):
        y_tile = jnp.where(inside, _rows(x_RD, row, tile) @ w_EDF[group], _rows(y_RF, row, tile))
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y_tile, row, 0)

    zeros_RF = _zeros((x_RD.shape[0], w_EDF.shape[2]), x_RD.dtype, x_RD, w_EDF)
    return _over_tiles(full, rest, zeros_RF, sizes_E, x_RD.shape[0])


def _forward(x_RD, w_EDF, sizes_E):
    return grouped_matmul(x_RD, w_EDF, sizes_E), (x_RD, w_EDF, sizes_E)


def _backward(saved, g_RF):
    x_RD, w_EDF, sizes_E = saved
    gx_RD = grouped_matmul(g_RF, w_EDF.swapaxes(1, 2), sizes_E)
    return gx_RD, _weight_gradient(x_RD, g_RF, sizes_E, w_EDF), None


grouped_matmul.defvjp(_forward, _backward)


def _weight_gradient(x_RD, g_RF, sizes_E, w_EDF):
    wide = jnp.promote_types(w_EDF.dtype, jnp.float32)

    def add(gw_EDF, group, x_tile, g_tile):
        part_DF = jax.lax.dot_general(x_tile, g_tile, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return gw_EDF.at[group].set(gw_EDF[group] + part_DF)

    def full(gw_EDF, row, group, tile):
        return add(gw_EDF, group, _rows(x_RD, row, tile), _rows(g_RF, row, tile))

    def rest(gw_EDF, row, group, tile, inside):
        return add(gw_EDF, group, *(jnp.where(inside, _rows(a, row, tile), 0) for a in (x_RD, g_RF)))

    zeros_EDF = _zeros(w_EDF.shape, wide, x_RD, w_EDF)
    return _over_tiles(full, rest, zeros_EDF, sizes_E, x_RD.shape[0]).astype(w_EDF.dtype)


def _rows(a_RX: jax.Array, row, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(a_RX, row, count)


def _zeros(shape: tuple[int, ...], dtype, *like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that all of `like` vary over, as a loop's carry must inside shard_map."""
    zero = sum(0 * jnp.isnan(a[(0,) * a.ndim]).astype(jnp.int32) for a in like)
    return jnp.zeros(shape, dtype) + jnp.asarray(zero, dtype)


def _over_tiles(full: Callable, rest: Callable, carry, sizes_E, rows: int):
    """carry = full(carry, first row, group, rows of the tile), and rest(..., which of its rows are the group's [tile,
    1])."""
    ends_E = jnp.cumsum(sizes_E)
    tiles_E = sizes_E // TILE_ROWS
    starts_E = ends_E - sizes_E + tiles_E * TILE_ROWS
    left_E = ends_E - starts_E
    if rows >= TILE_ROWS:
        carry = _loop(tiles_E, carry, lambda carry, group, i: full(
            carry, starts_E[group] - (i + 1) * TILE_ROWS, group, TILE_ROWS))
    for less, most in zip((0, *REST_ROWS), REST_ROWS, strict=False):
        if less >= rows:
            break
        tile = min(most, rows)

        def step(carry, group, i, tile=tile):
            first = jnp.minimum(starts_E[group], rows - tile)
            place = first + jnp.arange(tile)
            inside = (place >= starts_E[group]) & (place < ends_E[group])
            return rest(carry, first, group, tile, inside[:, None])

        carry = _loop((left_E > less) & (left_E <= most), carry, step)
    return carry


def _loop(counts_E, carry, step: Callable):
    """carry = step(carry, group, i) for i < counts_E[group] of each group."""
    last_E = jnp.cumsum(counts_E)

    def body(i, carry):
        group = (i >= last_E).sum()
        return step(carry, group, last_E[group] - 1 - i)

    return jax.lax.fori_loop(0, last_E[-1], body, carry)
