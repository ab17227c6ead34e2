"""encode_for, decode_from and sum_from: the codec's work as verbs that a schedule places apart from the collective.

P parts, one a destination (or source); N values of a part; Y bytes of a part. All of it works inside jit and shard_map.
"""

import math

import jax
import jax.numpy as jnp

from ..kernels import exponent_codec as kernel  # pyright: ignore[reportMissingImports]

Array = jax.Array


def encode_for(x: Array, destinations: int, codec: str) -> tuple[Array, kernel.Flags]:
    """payload_PY, uint8, and flags (overflow_P, used_P). x is not changed.

    x's first dim is cut into `destinations` equal parts, each coded by itself, so that one all_to_all of the payload's
    dim 0 carries it. A part whose overflow flag is set cannot be decoded: x must go raw.

        payload_PY, flags = encode_for(x_ED, 8, "x4s")
        got_PY = jax.lax.all_to_all(payload_PY, "node", 0, 0, tiled=True)
        y_PED = decode_from(got_PY, (E // 8, D), x_ED.dtype, "x4s")
    """
    if x.ndim == 0 or x.shape[0] % destinations:
        raise ValueError(f"destinations={destinations} must divide x's first dim, got shape {x.shape}")
    word_PN = words(x).reshape(destinations, x.size // destinations)
    return kernel.encode(word_PN, kernel.resolve(codec, x.dtype))


def decode_from(payload_PY: Array, shape: tuple[int, ...], dtype, codec: str) -> Array:
    """Parts [P, *shape] from their payload; shape and dtype are one part's."""
    fmt, n = _checked(payload_PY, shape, dtype, codec)
    return from_words(kernel.decode(payload_PY, n, fmt), dtype).reshape(payload_PY.shape[0], *shape)


def sum_from(payload_PY: Array, shape: tuple[int, ...], dtype, codec: str) -> Array:
    """float32 sum of the parts [*shape], added in the order of P."""
    fmt, n = _checked(payload_PY, shape, dtype, codec)
    return kernel.decode_sum(payload_PY, n, fmt).reshape(shape)


def overflowed(payload_PY: Array, shape: tuple[int, ...], dtype, codec: str) -> Array:
    """The sender's overflow flag of each part, bool [P], read from the payload: a receiver needs no other message."""
    fmt, n = _checked(payload_PY, shape, dtype, codec)
    return kernel.overflowed(payload_PY, n, fmt)


def wire_bytes(shape: tuple[int, ...], dtype, codec: str) -> int:
    """Y, bytes of one part of this shape. Static: it depends on no value."""
    return kernel.part_bytes(kernel.resolve(codec, jnp.dtype(dtype)), math.prod(shape))


def words(x: Array) -> Array:
    """The bits of x as unsigned integers; a collective of these moves every bit, where one of floats may not."""
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def from_words(word: Array, dtype) -> Array:
    return jax.lax.bitcast_convert_type(word, dtype)


def _checked(payload_PY: Array, shape: tuple[int, ...], dtype, codec: str) -> tuple[kernel.Format, int]:
    fmt, n = kernel.resolve(codec, jnp.dtype(dtype)), math.prod(shape)
    size = kernel.part_bytes(fmt, n)
    if payload_PY.dtype != jnp.uint8 or payload_PY.ndim != 2 or payload_PY.shape[1] != size:
        raise ValueError(f'payload of codec "{codec}" and shape {shape} must be uint8 (parts, {size}). '
                         f"Got {payload_PY.dtype} {payload_PY.shape}.")
    return fmt, n
