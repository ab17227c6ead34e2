"""The dense part of a tile as XLA: elementwise over rows of a tile, bytes throughout, for CPU and every GPU."""

from functools import reduce
from operator import add, or_
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .formats import ABOVE, ANCHOR, BELOW, COLUMNS, ESCAPE, NARROW, ROWS, ZERO, Format

Array = jax.Array


class Dense(NamedTuple):
    """Sections of X tiles that need no other tile; uint8, but for plane_XW.

    raw_XW: bool, sub-block must go raw. plane_XW: uint16, bits 3 of a sub-block's codes, row 0 in bit 0; or None.
    """

    rest_XRW: Array
    codes: Array
    top_XR: Array
    raw_XW: Array | None = None
    plane_XW: Array | None = None


def encode(word_XRW: Array, fmt: Format) -> Dense:
    """word_XRW: uint16."""
    e_XRW = exponent(word_XRW)
    rest_XRW = (word_XRW & 0x7F | word_XRW >> 8 & 0x80).astype(jnp.uint8)
    top_XR = _top(e_XRW)
    above_XRW = top_XR[..., None] - e_XRW
    if fmt.escapes:
        code_XRW = jnp.where(above_XRW < NARROW, above_XRW, ESCAPE).astype(jnp.uint8)
        return Dense(rest_XRW, _planes(code_XRW), top_XR)
    hit_XRW = above_XRW + ABOVE <= ABOVE + BELOW
    code_XRW = jnp.where(hit_XRW, above_XRW & 15, ZERO).astype(jnp.uint8)
    raw_XW = _any(~hit_XRW & (e_XRW != 0))
    if fmt.dense_bits == 4:
        return Dense(rest_XRW, code_XRW[:, :8] | code_XRW[:, 8:] << 4, top_XR, raw_XW)
    plane_XW = reduce(or_, ((code_XRW[:, r] >> 3).astype(jnp.uint16) << r for r in range(ROWS)))
    return Dense(rest_XRW, _planes(code_XRW), top_XR, raw_XW, jnp.where(raw_XW, 0, plane_XW))


def decode(dense: Dense, fmt: Format) -> Array:
    """uint16 words; those of raw sub-blocks and of x3's escapes have wrong exponents."""
    if fmt.dense_bits == 4:
        code_XRW = jnp.concatenate([dense.codes & 15, dense.codes >> 4], 1)
    else:
        code_XRW = _from_planes(dense.codes, dense.plane_XW)
    if fmt.escapes:
        e_XRW = dense.top_XR[..., None] - code_XRW
    else:
        above_XRW = (code_XRW + ABOVE & 15) - ABOVE
        e_XRW = jnp.where(code_XRW == ZERO, 0, dense.top_XR[..., None] - above_XRW)
    return join(e_XRW, dense.rest_XRW)


def decode_add(total_XRW: Array, dense: Dense, fmt: Format) -> Array:
    """float32 total + decoded words; where the sub-block is raw (dense.raw_XW), the total as it is."""
    assert dense.raw_XW is not None
    return jnp.where(dense.raw_XW[:, None], total_XRW, total_XRW + widened(decode(dense, fmt)))


def widened(word: Array) -> Array:
    """float32 of bfloat16's words by their bits: converting may flush subnormals."""
    return jax.lax.bitcast_convert_type(word.astype(jnp.uint32) << 16, jnp.float32)


def exponent(word: Array) -> Array:
    """Exponent field of uint16 words; the sign falls off."""
    return (word >> 7).astype(jnp.uint8)


def join(e: Array, rest: Array) -> Array:
    rest = rest.astype(jnp.uint16)
    return rest & 0x7F | (rest & 0x80) << 8 | e.astype(jnp.uint16) << 7


def _top(e_XRW: Array) -> Array:
    counted = (e_XRW != 0) & (e_XRW != 255)
    # Sum and count in one integer (256 * 254 < 2**16), over slices first: XLA:CPU adds slices as vectors.
    both_XRW = jnp.where(counted, e_XRW.astype(jnp.int32) + (1 << 16), 0)
    both_XR = reduce(add, (both_XRW[..., w : w + 32] for w in range(0, COLUMNS, 32))).sum(-1)
    count_XR, total_XR = both_XR >> 16, both_XR & 0xFFFF
    # The division comes last: XLA:CPU repeats cheap operations for every word, but not this one.
    return jax.lax.div(total_XR + ANCHOR * count_XR, jnp.maximum(count_XR, 1)).astype(jnp.uint8)


def _any(flag_XRW: Array) -> Array:
    return reduce(or_, (flag_XRW[:, r] for r in range(ROWS)))


def _planes(code_XRW: Array) -> Array:
    """Bits 0, 1, 2: [X, 3, 2, W]."""
    code_XhkW = code_XRW.reshape(-1, 2, 8, COLUMNS)
    return jnp.stack([reduce(or_, ((code_XhkW[:, :, k] >> b & 1) << k for k in range(8))) for b in range(3)], 1)


def _from_planes(codes_XbhW: Array, plane_XW: Array | None) -> Array:
    shift_k1 = jnp.arange(8, dtype=jnp.uint8)[:, None]
    planes = [codes_XbhW[:, b] for b in range(3)]
    if plane_XW is not None:
        planes.append(jnp.stack([plane_XW & 0xFF, plane_XW >> 8], 1).astype(jnp.uint8))
    code_XhkW = reduce(or_, ((p_XhW[:, :, None] >> shift_k1 & 1) << b for b, p_XhW in enumerate(planes)))
    return code_XhkW.reshape(-1, ROWS, COLUMNS)
