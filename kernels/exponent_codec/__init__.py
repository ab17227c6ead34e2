"""Exponent coding of words: encode, decode, decode and add. `formats` has the wire format, `ref` the definition."""

import jax
import jax.numpy as jnp

from . import payload, xla
from .formats import BLOCK, VERSION, Format, Pool, part_bytes, resolve
from .payload import Flags, overflowed
from .ref import decode as reference_decode
from .ref import encode as reference_encode

__all__ = [
    "BLOCK", "VERSION", "Flags", "Format", "Pool", "decode", "decode_sum", "encode", "overflowed", "part_bytes",
    "reference_decode", "reference_encode", "resolve", "sum_in_order",
]


def encode(word_PN: jax.Array, fmt: Format) -> tuple[jax.Array, Flags]:
    """payload_PY of `part_bytes` bytes a part, and flags. word_PN: uint16; uint32, if the format has low halves."""
    return payload.encode(word_PN, fmt, _backend(fmt).encode)


def decode(payload_PY: jax.Array, n: int, fmt: Format) -> jax.Array:
    """The n words of each part; parts that overflowed decode to something else."""
    return payload.decode(payload_PY, n, fmt, _backend(fmt).decode)


def decode_sum(payload_PY: jax.Array, n: int, fmt: Format) -> jax.Array:
    """float32 sum of the parts, added in order: [n]. With x4s and x3p of bfloat16, words are never stored."""
    if fmt.word_bytes == 4:
        return sum_in_order(jax.lax.bitcast_convert_type(decode(payload_PY, n, fmt), jnp.float32))
    if fmt.raw is None or n == 0:
        return sum_in_order(xla.widened(decode(payload_PY, n, fmt)))
    first_XRW = xla.widened(payload.decode_tiles(payload_PY[:1], n, fmt, _backend(fmt).decode)[0])

    def add(total_XRW, payload_Y):
        return payload.decode_add(total_XRW, payload_Y, n, fmt, _backend(fmt).decode_add), None

    return jax.lax.scan(add, first_XRW, payload_PY[1:])[0].reshape(-1)[:n]


def sum_in_order(x_PN: jax.Array) -> jax.Array:
    """Sum over P, one after the other."""
    total_N, _ = jax.lax.scan(lambda total_N, x_N: (total_N + x_N, None), x_PN[0], x_PN[1:])
    return total_N


def _backend(fmt: Format):
    """Mosaic on GPUs from Hopper on, for formats that it takes; XLA elsewhere."""
    on_gpu = jax.default_backend() == "gpu" and float(jax.devices()[0].compute_capability) >= 9
    if not on_gpu or fmt.raw is None:
        return xla
    from . import mosaic  # needs a jaxlib with GPU support

    return mosaic
