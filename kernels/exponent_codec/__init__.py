"""Exponent coding of words: encode, decode, decode and add. `formats` has the wire format, `ref` the definition."""

import jax
import jax.numpy as jnp

from . import payload, xla
from .formats import VERSION, Format, Pool, part_bytes, resolve
from .payload import Flags, overflowed
from .ref import decode as reference_decode
from .ref import encode as reference_encode

__all__ = [
    "VERSION", "Flags", "Format", "Pool", "decode", "decode_sum", "encode", "overflowed", "part_bytes",
    "reference_decode", "reference_encode", "resolve", "sum_in_order",
]


def encode(word_PN: jax.Array, fmt: Format) -> tuple[jax.Array, Flags]:
    """payload_PY of `part_bytes` bytes a part, and flags. word_PN: uint16; uint32, if the format has low halves."""
    return payload.encode(word_PN, fmt, xla.encode)


def decode(payload_PY: jax.Array, n: int, fmt: Format) -> jax.Array:
    """The n words of each part; parts that overflowed decode to something else."""
    return payload.decode(payload_PY, n, fmt, xla.decode)


def decode_sum(payload_PY: jax.Array, n: int, fmt: Format) -> jax.Array:
    """float32 sum of the parts, added in order: [n]. bfloat16 is widened by its bits, so that subnormals stay."""
    word_PN = decode(payload_PY, n, fmt)
    if fmt.word_bytes == 2:
        word_PN = word_PN.astype(jnp.uint32) << 16
    return sum_in_order(jax.lax.bitcast_convert_type(word_PN, jnp.float32))


def sum_in_order(x_PN: jax.Array) -> jax.Array:
    total_N, _ = jax.lax.scan(lambda total_N, x_N: (total_N + x_N, None), x_PN[0], x_PN[1:])
    return total_N
