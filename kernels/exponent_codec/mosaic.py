"""The dense part of a tile on GPUs from Hopper on, one pass each way: encode, decode, and decode-and-add to float32.

Mosaic GPU is the one hand-written backend: Pallas's other one, Triton, is marked for removal, and nothing here needs
what only it has. A tile is read by rows, so packing is elementwise; the one reduction is a row's sum. Prefix sums,
gathers and scatters, which Mosaic lacks, belong to the pools, over 1/16 of the values, in XLA after (or before) these.
One program a tile: 128 threads, two columns each, all 16 rows in registers; each byte is read and written once.
"""

from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .formats import ABOVE, ANCHOR, BELOW, COLUMNS, ROWS, ZERO, Format
from .xla import Dense

Array = jax.Array


def encode(word_XRW: Array, fmt: Format) -> Dense:
    """As `xla.encode`."""
    _check(fmt)
    tiles = word_XRW.shape[0]
    planar = fmt.dense_bits == 3
    shapes = [((tiles, ROWS, COLUMNS), jnp.uint8), (_codes_shape(tiles, fmt), jnp.uint8), ((tiles, ROWS), jnp.int32),
              ((tiles, COLUMNS), jnp.uint8), *([((tiles, COLUMNS), jnp.uint16)] if planar else [])]
    body = _encode_planes if planar else _encode_nibbles
    rest_XRW, codes, top_XR, raw_XW, *plane = _kernel(body, shapes, tiles)(word_XRW)
    return Dense(rest_XRW, codes, top_XR.astype(jnp.uint8), raw_XW != 0, plane[0] if plane else None)


def decode(dense: Dense, fmt: Format) -> Array:
    """As `xla.decode`."""
    _check(fmt)
    shape = dense.rest_XRW.shape
    inputs = (dense.rest_XRW, dense.codes, dense.top_XR.astype(jnp.int32))
    if fmt.dense_bits == 4:
        return _kernel(_decode_nibbles, [(shape, jnp.uint16)], shape[0])(*inputs)[0]
    return _kernel(_decode_planes, [(shape, jnp.uint16)], shape[0])(*inputs, dense.plane_XW)[0]


def decode_add(total_XRW: Array, dense: Dense, fmt: Format) -> Array:
    """float32 total + decoded words; where the sub-block is raw (dense.raw_XW), the total as it is."""
    _check(fmt)
    assert dense.raw_XW is not None
    shape = dense.rest_XRW.shape
    inputs = (total_XRW, dense.raw_XW.astype(jnp.uint8), dense.rest_XRW, dense.codes, dense.top_XR.astype(jnp.int32))
    if fmt.dense_bits == 4:
        return _kernel(_add_nibbles, [(shape, jnp.float32)], shape[0])(*inputs)[0]
    return _kernel(_add_planes, [(shape, jnp.float32)], shape[0])(*inputs, dense.plane_XW)[0]


def _check(fmt: Format) -> None:
    if fmt.raw is None:
        raise NotImplementedError(f"{fmt.name}: an escape has no sub-block to wait for; the XLA form serves it")


def _codes_shape(tiles: int, fmt: Format) -> tuple[int, ...]:
    return (tiles, 8, COLUMNS) if fmt.dense_bits == 4 else (tiles, 3, 2, COLUMNS)


def _kernel(body, shapes, tiles: int):
    out = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    return plgpu.kernel(body, out_type=out, grid=(tiles,), grid_names=("tile",))


def _encode_rows(word_ref, rest_ref, top_ref, raw_ref) -> tuple[list[Array], Array]:
    """Codes of the 16 rows and raw flags; these, rest and tops are written on the way."""
    t = jax.lax.axis_index("tile")
    codes, raw_W = [], jnp.zeros((COLUMNS,), jnp.int32)
    for r in range(ROWS):
        word_W = word_ref[t, r].astype(jnp.int32)
        e_W = word_W >> 7 & 0xFF
        rest_ref[t, r] = (word_W & 0x7F | word_W >> 8 & 0x80).astype(jnp.uint8)
        counted_W = (e_W != 0) & (e_W != 255)
        both = jnp.sum(jnp.where(counted_W, e_W + (1 << 16), 0))  # as in `xla`: sum and count in one
        count = both >> 16
        top = jax.lax.div((both & 0xFFFF) + ANCHOR * count, jnp.maximum(count, 1)) & 0xFF
        top_ref[t, r] = top
        hit_W = (top - e_W + ABOVE & 0xFF) <= ABOVE + BELOW
        codes.append(jnp.where(hit_W, top - e_W & 15, ZERO))
        raw_W = raw_W | jnp.where(hit_W | (e_W == 0), 0, 1)
    raw_ref[t] = raw_W.astype(jnp.uint8)
    return codes, raw_W


def _encode_nibbles(word_ref, rest_ref, codes_ref, top_ref, raw_ref):
    t = jax.lax.axis_index("tile")
    codes, _ = _encode_rows(word_ref, rest_ref, top_ref, raw_ref)
    for r in range(8):
        codes_ref[t, r] = (codes[r] | codes[r + 8] << 4).astype(jnp.uint8)


def _encode_planes(word_ref, rest_ref, codes_ref, top_ref, raw_ref, plane_ref):
    t = jax.lax.axis_index("tile")
    codes, raw_W = _encode_rows(word_ref, rest_ref, top_ref, raw_ref)
    for b in range(3):
        for h in range(2):
            codes_ref[t, b, h] = reduce(or_, ((codes[8 * h + k] >> b & 1) << k for k in range(8))).astype(jnp.uint8)
    plane_W = reduce(or_, ((codes[r] >> 3) << r for r in range(ROWS)))
    plane_ref[t] = jnp.where(raw_W != 0, 0, plane_W).astype(jnp.uint16)


def _nibbles(codes_ref, t) -> list[Array]:
    pairs = [codes_ref[t, r].astype(jnp.int32) for r in range(8)]
    return [pair_W & 15 for pair_W in pairs] + [pair_W >> 4 for pair_W in pairs]


def _planes(codes_ref, plane_ref, t) -> list[Array]:
    plane_W = plane_ref[t].astype(jnp.int32)
    dense = [[codes_ref[t, b, h].astype(jnp.int32) for b in range(3)] for h in range(2)]
    return [reduce(or_, ((dense[r // 8][b] >> r % 8 & 1) << b for b in range(3))) | (plane_W >> r & 1) << 3
            for r in range(ROWS)]


def _words(codes: list[Array], rest_ref, top_ref, t) -> list[Array]:
    """int32 words of the 16 rows."""
    words = []
    for r, code_W in enumerate(codes):
        above_W = (code_W + ABOVE & 15) - ABOVE
        e_W = jnp.where(code_W == ZERO, 0, top_ref[t, r] - above_W & 0xFF)
        rest_W = rest_ref[t, r].astype(jnp.int32)
        words.append(rest_W & 0x7F | (rest_W & 0x80) << 8 | e_W << 7)
    return words


def _decode_nibbles(rest_ref, codes_ref, top_ref, word_ref):
    t = jax.lax.axis_index("tile")
    for r, word_W in enumerate(_words(_nibbles(codes_ref, t), rest_ref, top_ref, t)):
        word_ref[t, r] = word_W.astype(jnp.uint16)


def _decode_planes(rest_ref, codes_ref, top_ref, plane_ref, word_ref):
    t = jax.lax.axis_index("tile")
    for r, word_W in enumerate(_words(_planes(codes_ref, plane_ref, t), rest_ref, top_ref, t)):
        word_ref[t, r] = word_W.astype(jnp.uint16)


def _add(words: list[Array], total_ref, raw_ref, sum_ref, t) -> None:
    raw_W = raw_ref[t].astype(jnp.int32)
    for r, word_W in enumerate(words):
        total_W = total_ref[t, r]
        x_W = jax.lax.bitcast_convert_type(word_W << 16, jnp.float32)
        sum_ref[t, r] = jnp.where(raw_W != 0, total_W, total_W + x_W)


def _add_nibbles(total_ref, raw_ref, rest_ref, codes_ref, top_ref, sum_ref):
    t = jax.lax.axis_index("tile")
    _add(_words(_nibbles(codes_ref, t), rest_ref, top_ref, t), total_ref, raw_ref, sum_ref, t)


def _add_planes(total_ref, raw_ref, rest_ref, codes_ref, top_ref, plane_ref, sum_ref):
    t = jax.lax.axis_index("tile")
    _add(_words(_planes(codes_ref, plane_ref, t), rest_ref, top_ref, t), total_ref, raw_ref, sum_ref, t)
