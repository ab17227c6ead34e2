"""Bitmaps and the pools of rows that belong to their set bits, in order.

V words of 32 bits in a bitmap, J pool rows. Positions come from population counts, so the one prefix sum is over
counts of words: no sum along, and no scatter of, anything as long as the message.
"""

import jax
import jax.numpy as jnp

Array = jax.Array


def pack_bits(flag_PS: Array) -> Array:
    """Bytes of a bitmap, bit i % 8 of byte i // 8 = flag i."""
    bits = flag_PS.reshape(*flag_PS.shape[:-1], -1, 8).astype(jnp.uint8)
    return (bits << jnp.arange(8, dtype=jnp.uint8)).sum(-1, dtype=jnp.uint8)


def as_words(map_PY: Array) -> Array:
    """uint32 words of a bitmap's bytes, little-endian as every supported backend is."""
    return jax.lax.bitcast_convert_type(map_PY.reshape(*map_PY.shape[:-1], -1, 4), jnp.uint32)


def set_bits(map_PV: Array, rows: int) -> tuple[Array, Array]:
    """Indices of the first `rows` set bits of each bitmap, and how many bits are set: index_PJ, total_P.

    What index_PJ holds beyond the total does not matter; it is not negative.
    """
    end_PV = _ends(map_PV)
    start_PV = end_PV - _count(map_PV)
    word_PJ = jax.vmap(lambda start_V: _owners(start_V, rows))(jnp.where(map_PV != 0, start_PV, rows))
    map_PJ, start_PJ = (jnp.take_along_axis(a, word_PJ, 1, mode="clip") for a in (map_PV, start_PV))
    return word_PJ * 32 + _select(map_PJ, jnp.arange(rows) - start_PJ), end_PV[:, -1]


def ranks(map_PV: Array) -> Array:
    """How many set bits precede each bit: [P, 32 V]."""
    below_32 = (jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)) - jnp.uint32(1)
    start_PV = _ends(map_PV) - _count(map_PV)
    return (start_PV[..., None] + _count(map_PV[..., None] & below_32)).reshape(map_PV.shape[0], -1)


def _count(word: Array) -> Array:
    return jax.lax.population_count(word).astype(jnp.int32)


def _ends(map_PV: Array) -> Array:
    """Inclusive prefix sum of counts, in two levels of eight words."""
    end_PT8 = jnp.cumsum(_count(map_PV).reshape(map_PV.shape[0], -1, 8), -1)
    total_PT = end_PT8[..., -1]
    return (end_PT8 + (jnp.cumsum(total_PT, -1) - total_PT)[..., None]).reshape(map_PV.shape)


def _owners(start_V: Array, rows: int) -> Array:
    """Word that each row comes from: words are marked where their rows start, and the marks filled in to the right."""
    width = 64
    marked_J = jnp.zeros(rows + -rows % width, jnp.int32).at[start_V].max(jnp.arange(start_V.size), mode="drop")
    filled_JW = jax.lax.cummax(marked_J.reshape(-1, width), 1)
    before_J = jnp.pad(jax.lax.cummax(filled_JW[:, -1]), (1, 0))[:-1]
    return jnp.maximum(filled_JW, before_J[:, None]).ravel()[:rows]


def _select(word: Array, nth: Array) -> Array:
    """Position of the nth set bit (from 0) of each word: as many prefixes hold at most n. One sum, so computed once."""
    through_32 = jnp.uint32(2**32 - 1) >> jnp.arange(31, -1, -1, dtype=jnp.uint32)
    return (_count(word[..., None] & through_32) <= nth[..., None]).sum(-1, dtype=jnp.int32)
