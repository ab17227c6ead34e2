"""The definition: one part, numpy, sub-block by sub-block. `formats` says where each byte lies."""

import numpy as np

from .formats import (
    ABOVE,
    ANCHOR,
    BELOW,
    COLUMNS,
    ESCAPE,
    LOW_POOL,
    NARROW,
    ROWS,
    VERSION,
    ZERO,
    Format,
    Pool,
    num_tiles,
    part_bytes,
    sections,
    split,
)


def encode(word_N: np.ndarray, fmt: Format) -> tuple[np.ndarray, bool]:
    """Bytes of a part of uint16 words (of uint32, if the format has low halves), and whether a pool overflowed."""
    if fmt.is_identity:
        return np.ascontiguousarray(word_N).view(np.uint8), False
    word_TRW = np.resize(word_N, (num_tiles(word_N.size), ROWS, COLUMNS))
    low_TRW = (word_TRW & 0xFFFF).astype("<u2")
    if fmt.low != "none":
        word_TRW = word_TRW >> 16
    e_TRW = (word_TRW >> 7 & 0xFF).astype(np.uint8)
    top_TR = np.array([[_top(e_W) for e_W in e_RW] for e_RW in e_TRW], np.uint8).reshape(e_TRW.shape[:2])
    above_TRW = top_TR[..., None] - e_TRW
    parts = [(word_TRW & 0x7F | word_TRW >> 8 & 0x80).astype(np.uint8)]
    if fmt.escapes:
        code_TRW = np.where(above_TRW < NARROW, above_TRW, ESCAPE)
        escaped = _in_plane_order(e_TRW)[_in_plane_order(code_TRW == ESCAPE)]
        space = np.zeros(fmt.escapes.rows(e_TRW.size), np.uint8)
        space[: escaped.size] = escaped[: space.size]
        pools, over = [space], escaped.size > space.size
    else:
        assert fmt.raw
        hit_TRW = above_TRW + np.uint8(ABOVE) <= ABOVE + BELOW
        code_TRW = np.where(hit_TRW, above_TRW % 16, ZERO)
        raw_TW = (~hit_TRW & (e_TRW != 0)).any(1)
        pools, over = _pool(raw_TW, [e_TRW[t, :, w] for t, w in np.argwhere(raw_TW)], fmt.raw)
        if fmt.plane:
            plane_TW = (code_TRW > 7).any(1) & ~raw_TW
            rows = [np.packbits(code_TRW[t, :, w] > 7, bitorder="little") for t, w in np.argwhere(plane_TW)]
            more, too = _pool(plane_TW, rows, fmt.plane)
            pools, over = pools + more, over or too
    parts += [_dense(code_TRW, fmt.dense_bits), top_TR, *pools]
    if fmt.low == "all":
        parts.append(low_TRW)
    if fmt.low == "pool":
        low_TW = (low_TRW != 0).any(1)
        more, too = _pool(low_TW, [low_TRW[t, :, w] for t, w in np.argwhere(low_TW)], LOW_POOL)
        parts, over = parts + more, over or too
    trailer = np.zeros(sections(fmt, word_N.size)["trailer"], np.uint8)
    trailer[:3] = VERSION, fmt.number, over
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8).ravel() for p in (*parts, trailer)]), over


def decode(payload: np.ndarray, n: int, fmt: Format) -> np.ndarray:
    """The n words of a part whose pools did not overflow."""
    assert payload.shape == (part_bytes(fmt, n),)
    if fmt.is_identity:
        return payload.view(np.uint16 if fmt.low == "none" else np.uint32)
    part = split(payload, fmt, n, lambda p, start, stop: p[start:stop])
    tiles = num_tiles(n)
    code_TRW = _undense(part["codes"], tiles, fmt.dense_bits)
    if fmt.plane:
        for (t, w), row in _rows_of(part["plane_map"], part["plane"], fmt.plane):
            code_TRW[t, :, w] += 8 * np.unpackbits(row, bitorder="little")
    if fmt.escapes:
        e_TRW = part["tops"].reshape(tiles, ROWS, 1) - code_TRW
        order = _in_plane_order(np.arange(e_TRW.size).reshape(e_TRW.shape))
        at = order[code_TRW.ravel()[order] == ESCAPE][: part["escapes"].size]
        e_TRW.ravel()[at] = part["escapes"][: at.size]
    else:
        assert fmt.raw
        above_TRW = (code_TRW + np.uint8(ABOVE)) % 16 - np.uint8(ABOVE)
        e_TRW = part["tops"].reshape(tiles, ROWS, 1) - above_TRW
        e_TRW[code_TRW == ZERO] = 0
        for (t, w), row in _rows_of(part["raw_map"], part["raw"], fmt.raw):
            e_TRW[t, :, w] = row
    rest_TRW = part["rest"].reshape(e_TRW.shape).astype(np.uint16)
    word_TRW = rest_TRW & 0x7F | (rest_TRW & 0x80) << 8 | e_TRW.astype(np.uint16) << 7
    if fmt.low == "none":
        return word_TRW.ravel()[:n]
    low_TRW = np.zeros(e_TRW.shape, np.uint32)
    if fmt.low == "all":
        low_TRW += part["low"].view("<u2").reshape(e_TRW.shape)
    else:
        for (t, w), row in _rows_of(part["low_map"], part["low"], LOW_POOL):
            low_TRW[t, :, w] = row.view("<u2")
    return (word_TRW.astype(np.uint32) << 16 | low_TRW).ravel()[:n]


def _top(e_W: np.ndarray) -> int:
    counted = [int(e) for e in e_W if 0 < e < 255]
    return (sum(counted) // len(counted) + ANCHOR) % 256 if counted else 0


def _dense(code_TRW: np.ndarray, bits: int) -> np.ndarray:
    code_TRW = code_TRW.astype(np.uint8)
    if bits == 4:
        return code_TRW[:, :8] | code_TRW[:, 8:] << 4
    code_ThkW = code_TRW.reshape(-1, 2, 8, COLUMNS)
    return np.stack([np.packbits(code_ThkW >> b & 1, 2, "little")[:, :, 0] for b in range(bits)], 1)


def _undense(code: np.ndarray, tiles: int, bits: int) -> np.ndarray:
    if bits == 4:
        pair_TRW = code.reshape(tiles, 8, COLUMNS)
        return np.concatenate([pair_TRW & 15, pair_TRW >> 4], 1)
    bit_TbRW = np.unpackbits(code.reshape(tiles, bits, 2, 1, COLUMNS), 3, bitorder="little")
    return np.bitwise_or.reduce([bit_TbRW[:, b].reshape(tiles, ROWS, COLUMNS) << b for b in range(bits)])


def _pool(flag: np.ndarray, rows: list, pool: Pool) -> tuple[list[np.ndarray], bool]:
    space = np.zeros((pool.rows(flag.size), pool.row_bytes), np.uint8)
    for i, row in enumerate(rows[: len(space)]):
        space[i] = np.ascontiguousarray(row).view(np.uint8)
    return [np.packbits(flag, bitorder="little"), space], len(rows) > len(space)


def _rows_of(bitmap: np.ndarray, space: np.ndarray, pool: Pool):
    flag = np.unpackbits(bitmap, bitorder="little").reshape(-1, COLUMNS)
    return zip(np.argwhere(flag), space.reshape(-1, pool.row_bytes), strict=False)


def _in_plane_order(x_TRW: np.ndarray) -> np.ndarray:
    return x_TRW.reshape(-1, 2, 8, COLUMNS).transpose(0, 1, 3, 2).ravel()
