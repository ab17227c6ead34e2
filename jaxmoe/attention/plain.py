"""Attention through jax.nn, with rotary positions."""

import jax
import jax.numpy as jnp


def rope(x_BSHD: jax.Array, theta: float) -> jax.Array:
    """Rotate pairs (i, i + D/2) of head dims by position / theta^(2i/D). (RoFormer, arXiv:2104.09864)"""
    half = x_BSHD.shape[-1] // 2
    angle_SD = jnp.arange(x_BSHD.shape[1])[:, None] * theta ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angle_SD)[:, None], jnp.sin(angle_SD)[:, None]
    wide = jnp.promote_types(x_BSHD.dtype, jnp.float32)
    a, b = jnp.split(x_BSHD.astype(wide), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BSHD.dtype)


def causal_attention(q_BSHD, k_BSHD, v_BSHD, token_mask=None) -> jax.Array:
    """Softmax attention to earlier positions; fewer key heads than query heads are shared in order."""
    mask = None if token_mask is None else token_mask[:, None, None, :]
    return jax.nn.dot_product_attention(q_BSHD, k_BSHD, v_BSHD, mask=mask, is_causal=True)
