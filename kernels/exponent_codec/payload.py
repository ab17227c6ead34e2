"""Parts to payloads and back: the dense sections by a backend, then the pools, which are XLA on every backend."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import xla
from .formats import COLUMNS, LOW_POOL, ROWS, TILE, VERSION, Format, Pool, num_tiles, sections, split
from .pools import as_words, pack_bits, ranks, set_bits

Array = jax.Array


class Flags(NamedTuple):
    """overflow_P: bool, the part cannot be decoded and must go raw. used_P: float32, used share of its fullest pool."""

    overflow_P: Array
    used_P: Array


def encode(word_PN: Array, fmt: Format, dense_encode: Callable[[Array, Format], xla.Dense]) -> tuple[Array, Flags]:
    """payload_PY, uint8, and flags; words are uint16, or uint32 if the format has low halves."""
    parts, n = word_PN.shape
    zero_P = (word_PN[:, 0] & 0) if n else jnp.zeros(parts, jnp.uint16)
    if fmt.is_identity:
        return _bytes(word_PN), Flags(zero_P != 0, zero_P.astype(jnp.float32))
    trailer_PY = jnp.array([VERSION, fmt.number, 0], jnp.uint8) + zero_P[:, None].astype(jnp.uint8)
    trailer_PY = jnp.pad(trailer_PY, ((0, 0), (0, sections(fmt, n)["trailer"] - 3)))
    if n == 0:
        return trailer_PY, Flags(zero_P != 0, zero_P.astype(jnp.float32))
    wide, narrow, used = _encode_words(word_PN, fmt, dense_encode)
    used_P = jnp.stack(used).max(0)
    trailer_PY = trailer_PY.at[:, 2].set((used_P > 1).astype(jnp.uint8))
    # Rows of 256 bytes to the end: XLA:CPU writes a section as vectors only if its last dim is that of the tiles.
    narrow_PY = jnp.concatenate([*(_bytes(section) for section in narrow), trailer_PY], 1)
    rows = [section.reshape(parts, -1, COLUMNS) for section in (*wide, narrow_PY)]
    return jnp.concatenate(rows, 1).reshape(parts, -1), Flags(used_P > 1, used_P)


def decode(payload_PY: Array, n: int, fmt: Format, dense_decode: Callable[[xla.Dense, Format], Array]) -> Array:
    """word_PN. Any bytes of the right number decode to some words: positions are clipped, or dropped, to the part."""
    parts = payload_PY.shape[0]
    if fmt.is_identity:
        return _from_bytes(payload_PY, jnp.uint16 if fmt.word_bytes == 2 else jnp.uint32, (n,))
    if n == 0:
        return jnp.zeros((parts, 0), jnp.uint16 if fmt.word_bytes == 2 else jnp.uint32)
    part = _sections(payload_PY, n, fmt)
    word_PTRW = decode_tiles(payload_PY, n, fmt, dense_decode)
    if fmt.low == "all":
        low_PTRW = _from_bytes(part["low"], jnp.uint16, word_PTRW.shape[1:])
    elif fmt.low == "pool":
        row_PJR = _from_bytes(part["low"], jnp.uint16, (-1, ROWS))
        low_PTRW = jax.vmap(_put_columns)(jnp.zeros_like(word_PTRW), *_at(part["low_map"], row_PJR), row_PJR)
    else:
        return word_PTRW.reshape(parts, -1)[:, :n]
    return (word_PTRW.astype(jnp.uint32) << 16 | low_PTRW).reshape(parts, -1)[:, :n]


def decode_tiles(payload_PY: Array, n: int, fmt: Format, dense_decode: Callable[[xla.Dense, Format], Array]) -> Array:
    """uint16 words [P, T, R, W], padding included: high halves, if there are low ones."""
    part = _sections(payload_PY, n, fmt)
    word_PTRW = dense_decode(_dense_sections(part, fmt), fmt).reshape(-1, num_tiles(n), ROWS, COLUMNS)
    return _patch(word_PTRW, part, fmt)


def decode_add(total_XRW: Array, payload_Y: Array, n: int, fmt: Format, dense_decode_add: Callable) -> Array:
    """float32 total [T, R, W] + one part: its dense sections, then the pool's rows; each value is added once."""
    part = _sections(payload_Y[None], n, fmt)
    raw_XW = _bits(as_words(part["raw_map"])).reshape(-1, COLUMNS)
    total_XRW = dense_decode_add(total_XRW, _dense_sections(part, fmt)._replace(raw_XW=raw_XW), fmt)
    index_J, valid_J, row_JR = (a[0] for a in _raw_rows(part, part["rest"].reshape(1, *total_XRW.shape)))
    tile_J = jnp.where(valid_J, index_J // COLUMNS, total_XRW.shape[0])
    return total_XRW.at[tile_J, :, index_J % COLUMNS].add(xla.widened(row_JR), mode="drop")


def _encode_words(word_PN: Array, fmt: Format, dense_encode) -> tuple[list[Array], list[Array], list[Array]]:
    """Sections in the order of the wire: those that are rows of tiles, then others; and the used share of each pool."""
    parts = word_PN.shape[0]
    word_PTRW = _tiles(word_PN)
    high_PTRW = word_PTRW if fmt.low == "none" else (word_PTRW >> 16).astype(jnp.uint16)
    dense = dense_encode(high_PTRW.reshape(-1, ROWS, COLUMNS), fmt)
    found, used = [dense.top_XR.reshape(parts, -1)], []

    def add(map_PY: Array, pool: Pool, take: Callable, source: Array) -> None:
        row_PJ, used_P = _fill(map_PY, pool, take, source)
        found.append(row_PJ)
        used.append(used_P)

    if fmt.escapes:
        add(_escape_map(dense.codes.reshape(parts, -1, 3, 2 * COLUMNS)), fmt.escapes, _take_escape, high_PTRW)
    if fmt.raw:
        found.append(pack_bits(dense.raw_XW.reshape(parts, -1)))
        add(found[-1], fmt.raw, lambda x, at: xla.exponent(_take_columns(x, at)), high_PTRW)
    if fmt.plane:
        plane_PS = dense.plane_XW.reshape(parts, -1)
        found.append(pack_bits(plane_PS != 0))
        add(found[-1], fmt.plane, lambda x, at: x.at[at].get(mode="clip"), plane_PS)
    if fmt.low == "all":
        found.append(word_PTRW.astype(jnp.uint16))
    if fmt.low == "pool":
        low_PTRW = word_PTRW.astype(jnp.uint16)
        found.append(pack_bits((low_PTRW != 0).any(2).reshape(parts, -1)))
        add(found[-1], LOW_POOL, _take_columns, low_PTRW)
    return [dense.rest_XRW, dense.codes], found, used


def _fill(map_PY: Array, pool: Pool, take: Callable, source: Array) -> tuple[Array, Array]:
    """The pool's rows, take(source of a part, indices) at the set bits, and their number over the pool's size."""
    rows = pool.rows(map_PY.shape[1] * 8)
    index_PJ, total_P = set_bits(as_words(map_PY), rows)
    row_PJ = jax.vmap(take)(source, index_PJ)
    empty_PJ = jnp.arange(rows) >= total_P[:, None]
    empty_PJ = empty_PJ.reshape(*empty_PJ.shape, *(1,) * (row_PJ.ndim - 2))
    return jnp.where(empty_PJ, 0, row_PJ), total_P.astype(jnp.float32) / rows


def _sections(payload_PY: Array, n: int, fmt: Format) -> dict[str, Array]:
    return split(payload_PY, fmt, n, lambda p, start, stop: p[:, start:stop])


def _dense_sections(part: dict[str, Array], fmt: Format) -> xla.Dense:
    codes_shape = (-1, 8, COLUMNS) if fmt.dense_bits == 4 else (-1, 3, 2, COLUMNS)
    plane_XW = None
    if fmt.plane:
        plane_PJ = _from_bytes(part["plane"], jnp.uint16, (-1,))
        map_PV = as_words(part["plane_map"])
        plane_PS = jax.vmap(lambda x, at: x.at[at].get(mode="clip"))(plane_PJ, ranks(map_PV))
        plane_XW = jnp.where(_bits(map_PV), plane_PS, 0).reshape(-1, COLUMNS)
    return xla.Dense(part["rest"].reshape(-1, ROWS, COLUMNS), part["codes"].reshape(codes_shape),
                     part["tops"].reshape(-1, ROWS), None, plane_XW)


def _patch(word_PTRW: Array, part: dict[str, Array], fmt: Format) -> Array:
    """Words with the exponents that the pools hold."""
    rest_PTRW = part["rest"].reshape(word_PTRW.shape)
    if fmt.escapes:
        map_PY = _escape_map(part["codes"].reshape(word_PTRW.shape[0], -1, 3, 2 * COLUMNS))
        return jax.vmap(_put_escapes)(word_PTRW, *_at(map_PY, part["escapes"]), part["escapes"], rest_PTRW)
    return jax.vmap(_put_columns)(word_PTRW, *_raw_rows(part, rest_PTRW))


def _raw_rows(part: dict[str, Array], rest_PTRW: Array) -> tuple[Array, Array, Array]:
    """Index of each raw sub-block, whether the row is in use, and its words."""
    e_PJR = part["raw"].reshape(rest_PTRW.shape[0], -1, ROWS)
    index_PJ, valid_PJ = _at(part["raw_map"], e_PJR)
    return index_PJ, valid_PJ, xla.join(e_PJR, jax.vmap(_take_columns)(rest_PTRW, index_PJ))


def _bits(map_PV: Array) -> Array:
    """bool [P, 32 V]."""
    return (map_PV[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1).reshape(map_PV.shape[0], -1) != 0


def _at(map_PY: Array, row_PJ: Array) -> tuple[Array, Array]:
    """Where the rows of a pool belong, and which of them are in use."""
    rows = row_PJ.shape[1]
    index_PJ, total_P = set_bits(as_words(map_PY), rows)
    return index_PJ, jnp.arange(rows) < total_P[:, None]


def _take_columns(x_TRW: Array, index_J: Array) -> Array:
    return x_TRW.at[index_J // COLUMNS, :, index_J % COLUMNS].get(mode="clip")


def _put_columns(x_TRW: Array, index_J: Array, valid_J: Array, row_JR: Array) -> Array:
    tile_J = jnp.where(valid_J, index_J // COLUMNS, x_TRW.shape[0])
    return x_TRW.at[tile_J, :, index_J % COLUMNS].set(row_JR, mode="drop")


def _escape_map(codes_PTbY: Array) -> Array:
    """Bytes of a bitmap of words with code 7, in the planes' own order (t, h, w, k)."""
    return (codes_PTbY[:, :, 0] & codes_PTbY[:, :, 1] & codes_PTbY[:, :, 2]).reshape(codes_PTbY.shape[0], -1)


def _escape_at(index_J: Array) -> tuple[Array, Array, Array]:
    k, w, h = index_J % 8, index_J // 8 % COLUMNS, index_J // (8 * COLUMNS) % 2
    return index_J // TILE, 8 * h + k, w


def _take_escape(x_TRW: Array, index_J: Array) -> Array:
    return xla.exponent(x_TRW.at[_escape_at(index_J)].get(mode="clip"))


def _put_escapes(x_TRW: Array, index_J: Array, valid_J: Array, e_J: Array, rest_TRW: Array) -> Array:
    t, r, w = _escape_at(index_J)
    word_J = xla.join(e_J, rest_TRW.at[t, r, w].get(mode="clip"))
    return x_TRW.at[jnp.where(valid_J, t, x_TRW.shape[0]), r, w].set(word_J, mode="drop")


def _tiles(word_PN: Array) -> Array:
    """[P, T, R, W], padded with the part's own first words, so that padding is coded like the rest."""
    parts, n = word_PN.shape
    missing = -n % TILE
    if missing:
        again_PN = jnp.tile(word_PN, (1, -(-missing // n)))[:, :missing]
        word_PN = jnp.concatenate([word_PN, again_PN], 1)
    return word_PN.reshape(parts, -1, ROWS, COLUMNS)


def _bytes(x: Array) -> Array:
    """[P, bytes] of [P, ...], little-endian."""
    if x.dtype != jnp.uint8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return x.reshape(x.shape[0], -1)


def _from_bytes(payload_PY: Array, dtype, shape: tuple[int, ...]) -> Array:
    size = jnp.dtype(dtype).itemsize
    grouped = payload_PY.reshape(payload_PY.shape[0], payload_PY.shape[1] // size, size)
    return jax.lax.bitcast_convert_type(grouped, dtype).reshape(payload_PY.shape[0], *shape)


def overflowed(payload_PY: Array, n: int, fmt: Format) -> Array:
    """Each part's overflow flag, as it travels: bool [P]."""
    if fmt.is_identity:
        return jnp.zeros(payload_PY.shape[0], bool)
    return payload_PY[:, payload_PY.shape[1] - sections(fmt, n)["trailer"] + 2] != 0
