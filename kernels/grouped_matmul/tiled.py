"""Functions of rows and their group's weights, in one loop over as many row tiles as are in use.

A group's last tile may reach into the next group's rows, whose own tiles come later and overwrite it. One loop does all
stages of a tile: where devices share cores, XLA:CPU spends more on passes over whole buffers, most of them unused rows,
and on starting operations, than a loop saves by doing less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TILE_ROWS = 192
Product = Callable[[jax.Array, jax.Array], jax.Array]
Stage = Callable[[Any, Any, Product], Any]   # see `jaxmoe.kernels.grouped_matmul.grouped_stages`


class Tiles(NamedTuple):
    """Of each tile its first row, its group and that group's end; count: tiles in use."""

    row_N: jax.Array
    group_N: jax.Array
    end_N: jax.Array
    count: jax.Array


def grouped_stages(stages: Sequence[Stage], x, w, sizes_E: jax.Array):
    """For the gradient, what each stage made is kept; weights' gradients are summed over tiles in float32 at least."""
    rows = jax.tree.leaves(x)[0].shape[0]
    tile = min(TILE_ROWS, -(-rows // 8) * 8)   # of float32 and CPUs' vectors
    on_tile = [partial(stage, product=jnp.matmul) for stage in stages]

    @jax.custom_vjp
    def run(x, w, sizes_E):
        return _cut(forward(_padded(x, tile), w, sizes_E)[-1], rows)

    def forward(x, w, sizes_E):
        """What each stage makes, with a tile more than rows."""
        row = jax.eval_shape(lambda x, w: _chain(on_tile, x, w), _rows(x, 0, tile), jax.tree.map(lambda a: a[0], w))
        buffers = jax.tree.map(lambda a: _zeros((rows + tile, *a.shape[1:]), a.dtype, x, w), row)

        def step(made, row, group, end):
            inside = _inside(row, end, tile)
            values = _chain(on_tile, _rows(x, row, tile), _at(w, group))
            values = [*values[:-1], _only(inside, values[-1])]
            return _put(made, values, row)

        return _over_tiles(step, buffers, _tiles(sizes_E, rows, tile))

    def saving(x, w, sizes_E):
        x = _padded(x, tile)
        made = forward(x, w, sizes_E)
        return _cut(made[-1], rows), (x, made[:-1], w, sizes_E)

    def backward(saved, g):
        x, made, w, sizes_E = saved
        g = _padded(g, tile)
        grads = (jax.tree.map(lambda a: _zeros(a.shape, a.dtype, x, g), x),
                 jax.tree.map(lambda a: _zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32), g, w), w))

        def step(grads, row, group, end):
            (gx, gw), inside, w_group = grads, _inside(row, end, tile), _at(w, group)
            values = [_only(inside, _rows(a, row, tile)) for a in (x, *made)]
            g_tile = _only(inside, _rows(g, row, tile))
            for stage, value in zip(reversed(on_tile), reversed(values), strict=True):
                g_tile, part = jax.vjp(stage, value, w_group)[1](g_tile)
                gw = jax.tree.map(lambda a, b: jax.lax.dynamic_update_index_in_dim(a, _at(a, group) + b, group, 0),
                                  gw, part)
            return _put(gx, g_tile, row), gw

        gx, gw = _over_tiles(step, grads, _tiles(sizes_E, rows, tile))
        return _cut(gx, rows), jax.tree.map(lambda a, b: a.astype(b.dtype), gw, w), None

    run.defvjp(saving, backward)
    return run(x, w, sizes_E)


def _chain(stages: Sequence[Stage], value, w) -> list:
    """What each stage makes."""
    made = []
    for stage in stages:
        value = stage(value, w)
        made.append(value)
    return made


def _tiles(sizes_E: jax.Array, rows: int, tile: int) -> Tiles:
    """In the order of their rows."""
    ends_E, tiles_E = jnp.cumsum(sizes_E), -(-sizes_E // tile)
    last_E = jnp.cumsum(tiles_E)
    number_N = jnp.arange(rows // tile + sizes_E.size)
    group_N = jnp.minimum((number_N[:, None] >= last_E).sum(1), sizes_E.size - 1)
    row_N = (ends_E - sizes_E - (last_E - tiles_E) * tile)[group_N] + number_N * tile
    return Tiles(row_N, group_N, ends_E[group_N], last_E[-1])


def _over_tiles(step: Callable, carry, tiles: Tiles):
    """carry = step(carry, first row, group, the group's end) over the tiles in use."""

    def body(i, carry):
        return step(carry, *_at((tiles.row_N, tiles.group_N, tiles.end_N), i))

    return jax.lax.fori_loop(0, tiles.count, body, carry)


def _padded(values, tile: int):
    """With so many rows more that a tile can start at any row."""
    return jax.tree.map(lambda a: jnp.pad(a, ((0, tile), (0, 0))), values)


def _cut(values, rows: int):
    return jax.tree.map(lambda a: a[:rows], values)


def _inside(row, end, tile: int) -> jax.Array:
    """Which rows of the tile are before `end`, [tile, 1]."""
    return (row + jnp.arange(tile) < end)[:, None]


def _only(inside: jax.Array, values):
    return jax.tree.map(lambda a: jnp.where(inside, a, 0), values)


def _rows(values, row, count: int):
    return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, row, count), values)


def _put(values, new, row):
    return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, row, 0), values, new)


def _at(values, i):
    return jax.tree.map(lambda a: a[0] if a.shape[0] == 1 else jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False),
                        values)


def _zeros(shape: tuple[int, ...], dtype, *like) -> jax.Array:
    """Zeros that vary over the mesh axes that all of `like` vary over, as a loop's carry must inside shard_map."""
    zero = sum(0 * jnp.isnan(a[(0,) * a.ndim]).astype(jnp.int32) for a in jax.tree.leaves(like))
    return jnp.zeros(shape, dtype) + jnp.asarray(zero, dtype)
