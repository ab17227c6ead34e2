"""Soft MoE: slots are weighted means of all tokens of a group."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..collectives import pmax, psum
from ..types import Groups, Mixing, Tokens
from .base import Weight, unit


@dataclass(frozen=True)
class Soft:
    """l = unit(x) (scale * unit(Phi)); slots = softmax_tokens(l)^T x; y = softmax_slots(l) expert(slots).

    Nothing is dropped and nothing is discrete. (Puigcerver et al. 2024, arXiv:2308.00951, eqs. 1-3 and section 2.3 for
    the normalisation.) slots_per_expert is fixed, whatever the sequence's length. Its cost is that of
    slots_per_expert * E tokens a group, and of products of tokens x slots x width.

    **It leaks the future in causal language models:** every slot mixes all tokens of its group. Use it for encoders.

    Example: ``moe = MoE(64, 128, 8, router=Soft(slots_per_expert=2), rngs=nnx.Rngs(0))``
    """

    slots_per_expert: int = 1

    def __post_init__(self):
        if self.slots_per_expert < 1:
            raise ValueError(f"router.slots_per_expert must be at least 1, got {self.slots_per_expert}")

    def weights(self, d_model: int, num_experts: int) -> dict[str, Weight]:
        shape = (d_model, num_experts, self.slots_per_expert)
        return {"phi_DEC": Weight(shape, d_model**-0.5), "scale": Weight((), 0.0, 1.0)}

    def pairs_per_token(self, num_experts: int) -> float:
        return 1.0

    def most_per_expert(self, tokens: int, num_experts: int) -> int:
        return self.slots_per_expert

    def __call__(self, weights, tokens: Tokens, groups: Groups, bias_E=None, key=None) -> Mixing:
        if tokens.forced_TK is not None:
            raise ValueError("forced_experts needs a router in which tokens choose experts, got Soft")
        wide = jnp.promote_types(tokens.x_TD.dtype, jnp.float32)
        phi_DEC = weights["scale"] * unit(weights["phi_DEC"].astype(wide), 0)
        logits_TEC = jnp.einsum("td,dec->tec", unit(tokens.x_TD.astype(wide), 1), phi_DEC)
        unpack_TEC = jax.nn.softmax(logits_TEC, (1, 2))
        E, C = logits_TEC.shape[1:]
        by_group = lambda a: a.reshape(groups.local, -1, E, C)  # noqa: E731
        masked_TEC = jnp.where(tokens.valid_T[:, None, None], logits_TEC, -jnp.inf)
        pack_GNEC = softmax_over_group(by_group(masked_TEC), groups)
        return Mixing(pack_GNEC, by_group(unpack_TEC), unpack_TEC.sum(2), jax.nn.logsumexp(logits_TEC, 2))


def softmax_over_group(logits_GNEC: jax.Array, groups: Groups) -> jax.Array:
    """Softmax over the tokens of a group, which may lie on several devices; 0 where all are -inf."""
    top_GEC = pmax(jax.lax.stop_gradient(logits_GNEC).max(1), groups.axes)
    exp_GNEC = jnp.exp(logits_GNEC - jnp.where(jnp.isfinite(top_GEC), top_GEC, 0)[:, None])
    total_GEC = psum(exp_GNEC.sum(1), groups.axes)
    return exp_GNEC / jnp.where(total_GEC > 0, total_GEC, 1)[:, None]
