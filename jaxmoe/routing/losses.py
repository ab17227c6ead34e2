"""Losses on routing, exact over the global batch whatever its sharding: sums are reduced before they are multiplied."""

import jax
import jax.numpy as jnp

from ..collectives import psum
from ..mesh import Axes


def load_balance(pairs_E: jax.Array, score_sum_E: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """E * sum_e f_e P_e; f_e = share of pairs sent to e, before drops (sums to 1); P_e = mean score of e.

    pairs_E, score_sum_E, num_tokens: sums over the global batch's valid tokens. 1 when routing is uniform, up to E.
    (Switch Transformer, arXiv:2101.03961, eq. 4; for k > 1 many write f_e summing to k: multiply by k.)
    """
    f_E = pairs_E / jnp.maximum(pairs_E.sum(), 1)
    return pairs_E.size * (f_E * score_sum_E / jnp.maximum(num_tokens, 1)).sum()


def router_z(logits_TE: jax.Array, valid_T: jax.Array, num_tokens: jax.Array, axes: Axes) -> jax.Array:
    """Mean of logsumexp(logits)^2 over valid tokens (ST-MoE, arXiv:2202.08906, eq. 5)."""
    z_T = jnp.where(valid_T, jax.nn.logsumexp(logits_TE, -1) ** 2, 0)
    return psum(z_T.sum(), axes) / jnp.maximum(num_tokens, 1)
