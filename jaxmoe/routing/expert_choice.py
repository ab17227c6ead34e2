"""Expert choice: each expert takes the tokens with the highest scores for it."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..collectives import all_gather, own_part
from ..types import Groups, Routing, Tokens
from .base import Weight, logits_of


@dataclass(frozen=True)
class ExpertChoice:
    """Each expert takes the C = ceil(capacity_factor * tokens_per_group / E) best tokens of each group.

    s = softmax(x W) over experts; a token's output is the sum of s_e expert_e(x) over the experts that took it, which
    may be none or all. Loads are equal by construction. (Zhou et al. 2022, arXiv:2202.09368, eqs. 1-2.)

    **It leaks the future in causal language models:** whether an expert takes a token depends on later tokens of its
    group, so the training loss is too low and cannot be reached when generating. Use it for encoders.

    Example: ``moe = MoE(64, 128, 8, router=ExpertChoice(capacity_factor=2.0), rngs=nnx.Rngs(0))``
    """

    capacity_factor: float = 2.0

    def __post_init__(self):
        if not self.capacity_factor > 0:
            raise ValueError(f"router.capacity_factor must be positive, got {self.capacity_factor}")

    def weights(self, d_model: int, num_experts: int) -> dict[str, Weight]:
        return {"w_DE": Weight((d_model, num_experts), d_model**-0.5)}

    def pairs_per_token(self, num_experts: int) -> float:
        return min(self.capacity_factor, num_experts)

    def most_per_expert(self, tokens: int, num_experts: int) -> int:
        return min(tokens, max(1, math.ceil(self.capacity_factor * tokens / num_experts)))

    def __call__(self, weights, tokens: Tokens, groups: Groups, bias_E=None, key=None) -> Routing:
        if tokens.forced_TK is not None:
            raise ValueError("forced_experts needs a router in which tokens choose experts, got ExpertChoice")
        logits_TE = logits_of(tokens.x_TD, weights["w_DE"])
        scores_TE = jax.nn.softmax(logits_TE)
        (T, E), take = scores_TE.shape, self.most_per_expert(groups.tokens, scores_TE.shape[1])
        wanted_TE = jnp.where(tokens.valid_T[:, None], jax.lax.stop_gradient(scores_TE), -jnp.inf)
        wanted_GNE = wanted_TE.reshape(groups.local, -1, E)
        order_GNE = jnp.argsort(-all_gather(wanted_GNE, groups.axes, 1), 1, stable=True)
        rank_GNE = own_part(jnp.argsort(order_GNE, 1), groups.axes, 1)
        chosen_TE = (rank_GNE < take).reshape(T, E) & tokens.valid_T[:, None]
        # Choices that are used come first: later parts go through no more of them than the busiest token has.
        experts_TE = jnp.argsort(~chosen_TE, 1, stable=True)
        at = lambda a: jnp.take_along_axis(a, experts_TE, 1)  # noqa: E731
        return Routing(experts_TE.astype(jnp.int32), at(scores_TE), at(chosen_TE), scores_TE, logits_TE)
