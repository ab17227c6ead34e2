"""Attention: plain products, or cuDNN's kernel through jax.nn; and rotary positions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def rope(x_BSHD: jax.Array, positions_BS: jax.Array, theta: float) -> jax.Array:
    """Rotate pairs (i, i + D/2) of head dims by position / theta^(2i/D). (RoFormer, arXiv:2104.09864)"""
    half = x_BSHD.shape[-1] // 2
    angle_BSD = positions_BS[..., None] * theta ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angle_BSD)[:, :, None], jnp.sin(angle_BSD)[:, :, None]
    wide = jnp.promote_types(x_BSHD.dtype, jnp.float32)
    a, b = jnp.split(x_BSHD.astype(wide), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BSHD.dtype)


def _fastest(dtype, width: int) -> str:
    """cuDNN where it runs: GPUs, 16-bit floats, head widths that are multiples of 8 up to 128."""
    fits = dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128
    return "cudnn" if fits and jax.default_backend() == "gpu" else "plain"


BACKENDS: dict[str, Callable[..., str]] = {  # name -> "plain" or "cudnn" for a dtype and a head width
    "auto": _fastest,
    "plain": lambda dtype, width: "plain",
    "cudnn": lambda dtype, width: "cudnn",
}


def attend(q_BSHD, k_BLHD, v_BLHD, mask_BSL=None, *, causal: bool = True, backend: str = "auto") -> jax.Array:
    """Softmax attention [B, S, H, D]; fewer key heads than query heads are shared in order.

    mask_BSL: bool, which keys each query may see, besides causality; None = all. causal: key l is seen from query s if
    l <= s. backend: a name of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if BACKENDS[backend](q_BSHD.dtype, q_BSHD.shape[-1]) == "plain":
        return plain(q_BSHD, k_BLHD, v_BLHD, mask_BSL, causal)
    mask = None if mask_BSL is None else mask_BSL[:, None]
    return jax.nn.dot_product_attention(q_BSHD, k_BLHD, v_BLHD, mask=mask, is_causal=causal, implementation="cudnn")


def plain(q_BSHD, k_BLHD, v_BLHD, mask_BSL, causal: bool) -> jax.Array:
    """`attend` in two products. Scores are at least float32: jax.nn's are float32 even where all else is float64."""
    (B, S, H, D), (L, shared) = q_BSHD.shape, k_BLHD.shape[1:3]
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)
    q_BSKGD = q_BSHD.reshape(B, S, shared, H // shared, D)   # key heads K, each of G query heads
    scores_BKGSL = jnp.einsum("bskgd,blkd->bkgsl", q_BSKGD, k_BLHD, preferred_element_type=wide) * D**-0.5
    seen_BSL = jnp.ones((1, S, L), bool) if mask_BSL is None else mask_BSL
    if causal:
        seen_BSL = seen_BSL & (jnp.arange(L) <= jnp.arange(S)[:, None])
    scores_BKGSL = jnp.where(seen_BSL[:, None, None], scores_BKGSL, jnp.finfo(wide).min)
    shares_BKGSL = jax.nn.softmax(scores_BKGSL).astype(v_BLHD.dtype)
    return jnp.einsum("bkgsl,blkd->bskgd", shares_BKGSL, v_BLHD).reshape(q_BSHD.shape)
