"""Top-k routing with softmax or sigmoid scores."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ..types import Routing


@dataclass(frozen=True)
class TopK:
    """Each token goes to the k experts with the highest scores.

    s = softmax(x W) or sigmoid(x W); y = scale * sum_{e in top-k} w_e expert_e(x), with w_e = s_e, or
    w_e = s_e / sum_{top-k} s if `normalize`. Equal scores go to the lowest index. (Shazeer et al. 2017,
    arXiv:1701.06538; sigmoid scores: DeepSeek-V3, arXiv:2412.19437.)

    normalize: None means k > 1. Normalised weights at k = 1 are constant 1, and the router gets no gradient from them.
    """

    k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool | None = None
    scale: float = 1.0

    def __call__(self, logits_TE: jax.Array, forced_TK: jax.Array | None = None) -> Routing:
        """logits_TE: at least float32. forced_TK: experts to use instead, -1 where the router is free."""
        num_experts = logits_TE.shape[-1]
        if not 1 <= self.k <= num_experts:
            raise ValueError(f"router.k must be between 1 and num_experts={num_experts}, got {self.k}")
        score = jax.nn.softmax if self.score == "softmax" else jax.nn.sigmoid
        scores_TE = score(logits_TE)
        _, experts_TK = jax.lax.top_k(jax.lax.stop_gradient(scores_TE), self.k)
        if forced_TK is not None:
            experts_TK = jnp.where(forced_TK >= 0, forced_TK, experts_TK)
        weights_TK = select(scores_TE, experts_TK)
        if self.k > 1 if self.normalize is None else self.normalize:
            weights_TK = weights_TK / jnp.maximum(weights_TK.sum(-1, keepdims=True), 1e-20)
        return Routing(experts_TK.astype(jnp.int32), self.scale * weights_TK, scores_TE, logits_TE)


def select(scores_TE: jax.Array, experts_TK: jax.Array) -> jax.Array:
    """scores_TE at experts_TK. A masked sum rather than a gather, whose transpose would be a scatter-add."""
    chosen_TKE = experts_TK[..., None] == jnp.arange(scores_TE.shape[-1])
    return jnp.where(chosen_TKE, scores_TE[:, None, :], 0).sum(-1)
