"""Attention through jax.nn, with rotary positions."""

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
    return "cudnn" if fits and jax.default_backend() == "gpu" else "xla"


BACKENDS: dict[str, Callable[..., str]] = {  # name -> jax.nn's implementation for a dtype and a head width
    "auto": _fastest,
    "plain": lambda dtype, width: "xla",
    "cudnn": lambda dtype, width: "cudnn",
}


def attend(q_BSHD, k_BLHD, v_BLHD, mask_BSL=None, *, causal: bool = True, backend: str = "auto") -> jax.Array:
    """Softmax attention [B, S, H, D]; fewer key heads than query heads are shared in order.

    mask_BSL: bool, which keys each query may see, besides causality; None = all. causal: key l is seen from query s if
    l <= s. backend: a name of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, got {backend!r}")
    implementation = BACKENDS[backend](q_BSHD.dtype, q_BSHD.shape[-1])
    mask = None if mask_BSL is None else mask_BSL[:, None]
    return jax.nn.dot_product_attention(
        q_BSHD, k_BLHD, v_BLHD, mask=mask, is_causal=causal, implementation=implementation  # type: ignore[arg-type]
    )
