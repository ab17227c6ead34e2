"""Root-mean-square normalisation."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dim, in at least float32. (arXiv:1910.07467)"""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)
