"""Cosine routing on a low-rank projection (X-MoE)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..types import Groups, Routing, Tokens
from .base import Weight, check_k, choose, logits_of, unit


@dataclass(frozen=True)
class Cosine:
    """s_e = cos(W x, v_e) / tau with W: D -> projection_rank and learned tau; softmax over all experts, then top-k.

    (X-MoE, arXiv:2204.09179, eqs. 5-6.) tau starts at 0.07, as there; it is stored as a logarithm, so that it stays
    positive (ours). projection_rank: None means half of the number of experts, as there.

    Example: ``moe = MoE(64, 128, 8, router=Cosine(k=1, projection_rank=4), rngs=nnx.Rngs(0))``
    """

    k: int = 1
    projection_rank: int | None = None
    normalize: bool = False

    def weights(self, d_model: int, num_experts: int) -> dict[str, Weight]:
        check_k(self.k, num_experts)
        rank = self.projection_rank or max(2, num_experts // 2)
        return {
            "w_DR": Weight((d_model, rank), d_model**-0.5),
            "v_RE": Weight((rank, num_experts), rank**-0.5),
            "log_tau": Weight((), 0.0, math.log(0.07)),
        }

    def pairs_per_token(self, num_experts: int) -> float:
        return self.k

    def most_per_expert(self, tokens: int, num_experts: int) -> int:
        return tokens

    def __call__(self, weights, tokens: Tokens, groups: Groups, bias_E=None, key=None) -> Routing:
        low_TR = unit(logits_of(tokens.x_TD, weights["w_DR"]), -1)
        logits_TE = low_TR @ unit(weights["v_RE"].astype(low_TR.dtype), 0)
        logits_TE = logits_TE * jnp.exp(-weights["log_tau"]).astype(low_TR.dtype)
        return choose(jax.nn.softmax(logits_TE), logits_TE, logits_TE, self.k, normalize=self.normalize,
                      forced_TK=tokens.forced_TK, valid_T=tokens.valid_T)
