"""Functions of rows and their group's weights: for each group, in turn, loops over as many row tiles as are in use.

Large tiles first, as adding to weights' gradients costs the same for any tile; then smaller ones, of which the smallest
may reach past its group's end, so that it is merged into what is there. A loop does all stages of a tile: where devices
share cores, XLA:CPU spends more on passes over whole buffers, most of them unused rows, than on starting operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TILE_ROWS = (512, 256, 128)
Product = Callable[[jax.Array, jax.Array], jax.Array]
Stage = Callable[..., Any]   # see `jaxmoe.kernels.grouped_matmul.grouped_stages`


class Tile(NamedTuple):
    """Rows first to first + rows, of which those in inside [rows, 1] are the group's; None = all."""

    first: jax.Array
    rows: int
    inside: jax.Array | None

    def read(self, values):
        """Its rows, zero outside the group."""
        def get(a):
            b = jax.lax.dynamic_slice_in_dim(a, self.first, self.rows)
            return b if self.inside is None else jnp.where(self.inside, b, 0)

        return jax.tree.map(get, values)

    def write(self, values, new):
        """values with new rows in the group's."""

        def put(a, b):
            if self.inside is not None:
                b = jnp.where(self.inside, b, jax.lax.dynamic_slice_in_dim(a, self.first, self.rows))
            return jax.lax.dynamic_update_slice_in_dim(a, b, self.first, 0)

        return jax.tree.map(put, values, new)


def grouped_stages(stages: Sequence[Stage], x, w, sizes_E: jax.Array):
    """For the gradient, what each stage made is kept; weights' gradients are summed over tiles in float32 at least."""
    rows = jax.tree.leaves(x)[0].shape[0]
    on_tile = [partial(stage, product=jnp.matmul) for stage in stages]

    @jax.custom_vjp
    def run(x, w, sizes_E):
        return forward(x, w, sizes_E)[-1]

    def forward(x, w, sizes_E):
        """What each stage makes."""
        shapes = jax.eval_shape(lambda x, w: _chain(on_tile, x, w), x, jax.tree.map(lambda a: a[0], w))
        zeros = jax.tree.map(lambda a: _zeros(a.shape, a.dtype, x, w), shapes)

        def group(made, w, start, end):
            return _over_tiles(lambda made, tile: tile.write(made, _chain(on_tile, tile.read(x), w)),
                               made, start, end, rows), None

        return _over_groups(group, zeros, w, sizes_E)[0]

    def saving(x, w, sizes_E):
        made = forward(x, w, sizes_E)
        return made[-1], (x, made[:-1], w, sizes_E)

    def backward(saved, g):
        x, made, w, sizes_E = saved

        def group(gx, w, start, end):
            zeros = jax.tree.map(lambda a: _zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32), g, a), w)

            def step(grads, tile):
                (gx, gw), g_tile = grads, tile.read(g)
                for stage, value in zip(reversed(on_tile), reversed([x, *made]), strict=True):
                    g_tile, part = jax.vjp(stage, tile.read(value), w)[1](g_tile)
                    gw = jax.tree.map(jnp.add, gw, part)
                return tile.write(gx, g_tile), gw

            gx, gw = _over_tiles(step, (gx, zeros), start, end, rows)
            return gx, jax.tree.map(lambda a, b: a.astype(b.dtype), gw, w)

        zeros = jax.tree.map(lambda a: _zeros(a.shape, a.dtype, x, g), x)
        return *_over_groups(group, zeros, w, sizes_E), None

    run.defvjp(saving, backward)
    return run(x, w, sizes_E)


def _chain(stages: Sequence[Stage], value, w) -> list:
    """What each stage makes."""
    made = []
    for stage in stages:
        value = stage(value, w)
        made.append(value)
    return made


def _over_groups(group: Callable, carry, w, sizes_E: jax.Array):
    """carry, out = group(carry, w, start, end) for the matrices and rows of each group in turn; out stacked."""
    ends_E = jnp.cumsum(sizes_E)
    return jax.lax.scan(lambda carry, of_group: group(carry, *of_group), carry, (w, ends_E - sizes_E, ends_E))


def _over_tiles(step: Callable, carry, start: jax.Array, end: jax.Array, rows: int):
    """carry = step(carry, tile) over tiles of the rows start to end, of so many rows of all groups."""

    def whole(size: int, start: jax.Array):
        return lambda i, carry: step(carry, Tile(start + i * size, size, None))

    def last(size: int, start: jax.Array):
        def body(i, carry):
            at = start + i * size
            first = jnp.minimum(at, rows - size)
            place = first + jnp.arange(size)
            return step(carry, Tile(first, size, ((place >= at) & (place < end))[:, None]))

        return body

    for size in TILE_ROWS[:-1]:
        if size <= rows:
            count = (end - start) // size
            carry = jax.lax.fori_loop(0, count, whole(size, start), carry)
            start = start + count * size
    size = min(TILE_ROWS[-1], rows)
    return jax.lax.fori_loop(0, -(-(end - start) // size), last(size, start), carry)


def _zeros(shape: tuple[int, ...], dtype, *like) -> jax.Array:
    """Zeros that vary over the mesh axes that all of `like` vary over, as a loop's carry must inside shard_map."""
    zero = sum(0 * jnp.isnan(a[(0,) * a.ndim]).astype(jnp.int32) for a in jax.tree.leaves(like))
    return jnp.zeros(shape, dtype) + jnp.asarray(zero, dtype)
