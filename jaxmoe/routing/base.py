"""What routers share: their weights, choosing the best experts, and the balancing bias.

A router is a frozen dataclass with

    weights(d_model, num_experts) -> {name: Weight}     the parameters it needs
    pairs_per_token(num_experts) -> float               choices of a token on average, which `capacity_factor` counts
    most_per_expert(tokens, num_experts) -> int         most tokens of a group that can choose one expert
    __call__(weights, tokens, groups, bias_E, key)      Routing, or Mixing
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..types import Routing


class Weight(NamedTuple):
    """A router's parameter, created as N(mean, scale^2)."""

    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0


def logits_of(x_TD: jax.Array, w_DE: jax.Array) -> jax.Array:
    """x W in at least float32: routing decisions must not depend on the compute type."""
    wide = jnp.promote_types(x_TD.dtype, jnp.float32)
    return x_TD.astype(wide) @ w_DE.astype(wide)


def check_k(k: int, reachable: int, experts: str = "num_experts") -> None:
    """Raise ValueError unless a token can choose k of so many experts."""
    if not 1 <= k <= reachable:
        raise ValueError(f"router.k must be between 1 and {experts}={reachable}, got {k}")


def choose(
    scores_TE: jax.Array, logits_TE: jax.Array, ranking_TE: jax.Array, k: int, *, normalize: bool, scale: float = 1.0,
    forced_TK: jax.Array | None = None, valid_T: jax.Array,
) -> Routing:
    """The k experts of the highest ranking_TE, ties to the lowest index, weighted by their scores."""
    _, experts_TK = jax.lax.top_k(jax.lax.stop_gradient(ranking_TE), k)
    if forced_TK is not None:
        experts_TK = jnp.where(forced_TK >= 0, forced_TK, experts_TK)
    weights_TK = select(scores_TE, experts_TK)
    if normalize:
        weights_TK = weights_TK / jnp.maximum(weights_TK.sum(-1, keepdims=True), 1e-20)
    chosen_TK = jnp.broadcast_to(valid_T[:, None], experts_TK.shape)
    return Routing(experts_TK.astype(jnp.int32), scale * weights_TK, chosen_TK, scores_TE, logits_TE)


def select(scores_TE: jax.Array, experts_TK: jax.Array) -> jax.Array:
    """scores_TE at experts_TK. A masked sum rather than a gather, whose transpose would be a scatter-add."""
    chosen_TKE = experts_TK[..., None] == jnp.arange(scores_TE.shape[-1])
    return jnp.where(chosen_TKE, scores_TE[:, None, :], 0).sum(-1)


def updated_bias(bias_E: jax.Array, tokens_E: jax.Array, rate: float) -> jax.Array:
    """The balancing bias after one optimizer step: up for experts below the mean load, down for those above.

    tokens_E: pairs of each expert in the global batch of the whole step. The mean over experts stays zero, as a common
    shift changes no choice. (Auxiliary-loss-free balancing, arXiv:2408.15664, algorithm 1; the mean is our choice.)
    """
    bias_E = bias_E + rate * jnp.sign(tokens_E.mean() - tokens_E).astype(bias_E.dtype)
    return bias_E - bias_E.mean()


def unit(x: jax.Array, dim: int) -> jax.Array:
    """x / |x| along dim; at 0 the identity, so that it has a gradient there."""
    square = (x * x).sum(dim, keepdims=True)
    return x * jax.lax.rsqrt(jnp.where(square > 0, square, 1))
