"""Noisy top-k routing, as in GShard and the first sparsely gated layers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..types import Groups, Routing, Tokens
from .base import Weight, check_k, choose, logits_of


@dataclass(frozen=True)
class NoisyTopK:
    """h = x W + n * softplus(x W_noise), n ~ N(0, 1); the top-k of h, weighted by softmax over these k values of h.

    (Shazeer et al. 2017, arXiv:1701.06538, eqs. 3-5; the gate that FSMoE calls GShard's.) Noise is drawn where a `key`
    is given, that is in training; it is a function of the key and of the token's position in the global batch, so that
    it does not depend on the mesh.

    Example: ``moe = MoE(64, 128, 8, router=NoisyTopK(), rngs=nnx.Rngs(0)); y, aux = moe(x_BSD, key=jax.random.key(0))``
    """

    k: int = 2

    def weights(self, d_model: int, num_experts: int) -> dict[str, Weight]:
        check_k(self.k, num_experts)
        shape = (d_model, num_experts)
        return {"w_DE": Weight(shape, d_model**-0.5), "w_noise_DE": Weight(shape, 0.0)}

    def pairs_per_token(self, num_experts: int) -> float:
        return self.k

    def most_per_expert(self, tokens: int, num_experts: int) -> int:
        return tokens

    def __call__(self, weights, tokens: Tokens, groups: Groups, bias_E=None, key=None) -> Routing:
        logits_TE = logits_of(tokens.x_TD, weights["w_DE"])
        if key is not None:
            noise_TE = token_noise(key, tokens.index_T, logits_TE.shape[1], logits_TE.dtype)
            logits_TE = logits_TE + noise_TE * jax.nn.softplus(logits_of(tokens.x_TD, weights["w_noise_DE"]))
        # Normalised softmax over all experts is softmax over the chosen ones.
        return choose(jax.nn.softmax(logits_TE), logits_TE, logits_TE, self.k, normalize=self.k > 1,
                      forced_TK=tokens.forced_TK, valid_T=tokens.valid_T)


def token_noise(key: jax.Array, index_T: jax.Array, num_experts: int, dtype) -> jax.Array:
    """Standard normal [T, E], each row a function of the key and the token's global index."""
    return jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (num_experts,), jnp.dtype(dtype)))(index_T)
