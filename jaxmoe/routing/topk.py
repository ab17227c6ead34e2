"""Top-k routing with softmax or sigmoid scores, group-limited, balanced by a bias."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ..types import Groups, Routing, Tokens
from .base import Weight, check_k, choose, logits_of


@dataclass(frozen=True)
class TopK:
    """Each token goes to the k experts with the highest scores.

    s = softmax(x W) or sigmoid(x W); y = scale * sum_{e in top-k of s + b} w_e expert_e(x), with w_e = s_e, or
    w_e = s_e / sum_{top-k} s if `normalize`. (Shazeer et al. 2017, arXiv:1701.06538; sigmoid, groups and bias:
    DeepSeek-V3, arXiv:2412.19437, section 2.1.2.)

    normalize: None means k > 1. Normalised weights at k = 1 are constant 1, and the router gets no gradient from them.
    groups, groups_kept: experts are in `groups` equal groups; only the best `groups_kept` groups can be chosen, ranked
    by the sum of their two best s + b. bias_update_rate: if not 0, b is a state that `updated_bias` changes once a
    step; it has a part in the choice only, never in the weights or the gradient.

    Example: ``moe = MoE(64, 128, 8, router=TopK(k=2, score="sigmoid", bias_update_rate=1e-3), rngs=nnx.Rngs(0))``
    """

    k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool | None = None
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    bias_update_rate: float = 0.0

    def weights(self, d_model: int, num_experts: int) -> dict[str, Weight]:
        if num_experts % self.groups or not 1 <= self.groups_kept <= self.groups:
            raise ValueError(f"router.groups must divide num_experts={num_experts}, and router.groups_kept be "
                             f"between 1 and router.groups, got {self.groups} and {self.groups_kept}")
        reachable = num_experts // self.groups * self.groups_kept
        check_k(self.k, reachable, "num_experts" if self.groups == 1 else "the experts of router.groups_kept groups")
        return {"w_DE": Weight((d_model, num_experts), d_model**-0.5)}

    def pairs_per_token(self, num_experts: int) -> float:
        return self.k

    def most_per_expert(self, tokens: int, num_experts: int) -> int:
        return tokens

    def __call__(self, weights, tokens: Tokens, groups: Groups, bias_E=None, key=None) -> Routing:
        logits_TE = logits_of(tokens.x_TD, weights["w_DE"])
        scores_TE = (jax.nn.softmax if self.score == "softmax" else jax.nn.sigmoid)(logits_TE)
        ranking_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if self.groups_kept < self.groups:
            ranking_TE = self._limited(ranking_TE)
        normalize = self.k > 1 if self.normalize is None else self.normalize
        return choose(scores_TE, logits_TE, ranking_TE, self.k, normalize=normalize, scale=self.scale,
                      forced_TK=tokens.forced_TK, valid_T=tokens.valid_T)

    def _limited(self, ranking_TE):
        """-inf outside each token's best groups."""
        grouped_TGE = ranking_TE.reshape(ranking_TE.shape[0], self.groups, -1)
        best_TG = jax.lax.top_k(grouped_TGE, min(2, grouped_TGE.shape[-1]))[0].sum(-1)
        _, kept = jax.lax.top_k(best_TG, self.groups_kept)
        kept_TG = (kept[..., None] == jnp.arange(self.groups)).any(1)
        return jnp.where(kept_TG[..., None], grouped_TGE, -jnp.inf).reshape(ranking_TE.shape)
