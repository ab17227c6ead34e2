"""Losses and statistics of routing, exact over the global batch whatever its sharding.

Sums are reduced over devices before they are multiplied: products of local means would depend on the mesh.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..collectives import all_gather, pmax, psum
from ..types import Array, Aux, Axes, Groups, Mixing, Routing, Tokens


def switch(usage_TE: Array, scores_TE: Array, tokens: Tokens, groups: Groups, axes: Axes) -> Array:
    """E * sum_e f_e P_e; f_e = share of pairs sent to e, before drops (sums to 1); P_e = mean score of e.

    1 when routing is uniform, up to E. (Switch Transformer, arXiv:2101.03961, eq. 4; Megatron's for any k.)
    """
    count = tokens.valid_T.sum(dtype=scores_TE.dtype)
    usage_E, scores_E, count = psum((usage_TE.sum(0), scores_TE.sum(0), count), axes)
    f_E = usage_E / jnp.maximum(usage_E.sum(), 1)
    return usage_E.size * (f_E * scores_E).sum() / jnp.maximum(count, 1)


def hf(usage_TE: Array, scores_TE: Array, tokens: Tokens, groups: Groups, axes: Axes) -> Array:
    """As `switch`, but f_e sums to k: the loss is k when routing is uniform (Hugging Face's Mixtral, one layer)."""
    pairs, count = psum((usage_TE.sum(), tokens.valid_T.sum(dtype=scores_TE.dtype)), axes)
    return switch(usage_TE, scores_TE, tokens, groups, axes) * pairs / jnp.maximum(count, 1)


def deepseek_seq(usage_TE: Array, scores_TE: Array, tokens: Tokens, groups: Groups, axes: Axes) -> Array:
    """Mean over documents of sum_e f_e P_e within the document; f_e sums to E, P_e is the mean of normalised scores.

    A document is a sequence, or one segment of a packed one. (DeepSeek-V3, arXiv:2412.19437, eqs. 17-20.) With c the
    choices and p the scores of a token t, and n the length of its document, the sum over a document is
    E / (k n^2) sum_t c_t . (sum of p in the document), so a mask of token pairs stands in for a list of documents.
    """
    E = usage_TE.shape[1]
    scores_TE = scores_TE / jnp.maximum(scores_TE.sum(-1, keepdims=True), 1e-20)

    def by_sequence(a):
        a = a.reshape(groups.local, -1, groups.sequences, *a.shape[1:]).swapaxes(1, 2)
        return a.reshape(-1, *a.shape[2:])

    usage_BSE, scores_BSE = by_sequence(usage_TE), by_sequence(scores_TE)
    valid_BS, segment_BS = by_sequence(tokens.valid_T), by_sequence(tokens.segment_T)
    everywhere = lambda a: all_gather(a, groups.axes, 1)  # noqa: E731
    same_BST = valid_BS[:, :, None] & (segment_BS[:, :, None] == everywhere(segment_BS)[:, None])
    same_BST = (same_BST & everywhere(valid_BS)[:, None]).astype(scores_TE.dtype)
    length_BS = jnp.maximum(same_BST.sum(-1), 1)
    pairs_BS = jnp.maximum(jnp.einsum("bst,bt->bs", same_BST, everywhere(usage_BSE.sum(-1))), 1)
    document_BSE = jnp.einsum("bst,bte->bse", same_BST, everywhere(scores_BSE))
    loss = ((usage_BSE * document_BSE).sum(-1) * E / (pairs_BS * length_BS)).sum()
    total, documents = psum((loss, (valid_BS / length_BS).sum()), axes)
    return total / jnp.maximum(documents, 1)


LOAD_BALANCE: dict[str, Callable[..., Array]] = {
    "switch": switch, "megatron": switch, "hf": hf, "deepseek_seq": deepseek_seq,
}


def router_z(logits_TE: Array, valid_T: Array, axes: Axes) -> Array:
    """Mean of logsumexp(logits)^2 over valid tokens (ST-MoE, arXiv:2202.08906, eq. 5)."""
    z_T = jnp.where(valid_T, jax.nn.logsumexp(logits_TE, -1) ** 2, 0)
    total, count = psum((z_T.sum(), valid_T.sum(dtype=z_T.dtype)), axes)
    return total / jnp.maximum(count, 1)


def importance(weight_TE: Array, axes: Axes) -> Array:
    """Squared coefficient of variation of the experts' summed weights (Shazeer 2017, arXiv:1701.06538, eq. 7)."""
    total_E = psum(weight_TE.sum(0), axes)
    return total_E.var() / jnp.maximum(total_E.mean() ** 2, 1e-20)


def statistics(
    routing: Routing | Mixing, tokens: Tokens, groups: Groups, dropped: Array, nonfinite: Array, balance: str,
    axes: Axes, fair_load: float,
) -> Aux:
    """Losses and metrics, the same on every device. fair_load: pairs of an expert in a group if all had as many."""
    scores_TE = jnp.where(tokens.valid_T[:, None], routing.scores_TE, 0)
    usage_TE, weight_TE = _usage(routing, tokens)
    loads_GE = psum(usage_TE.reshape(groups.local, -1, usage_TE.shape[1]).sum(1), groups.axes)
    pairs_E, dropped, nonfinite = psum(
        (usage_TE.sum(0), dropped.astype(usage_TE.dtype), nonfinite.astype(usage_TE.dtype)), axes)
    pairs = jnp.maximum(pairs_E.sum(), 1)
    losses = {
        "load_balance": LOAD_BALANCE[balance](usage_TE, scores_TE, tokens, groups, axes),
        "router_z": router_z(routing.logits_TE, tokens.valid_T, axes),
        "importance": importance(weight_TE, axes),
    }
    metrics = {
        "dropped_pairs": dropped,
        "nonfinite_tokens": nonfinite,
        "max_over_mean_load": pairs_E.max() * pairs_E.size / pairs,
        "dead_experts": (pairs_E == 0).sum(),
        "router_entropy": _entropy(scores_TE, tokens.valid_T, axes),
        "sufficient_capacity_factor": pmax(loads_GE.max(), axes) / fair_load,
    }
    return Aux(losses, pairs_E, dropped / pairs, jax.lax.stop_gradient(metrics))


def _usage(routing: Routing | Mixing, tokens: Tokens) -> tuple[Array, Array]:
    """Per token and expert: how many pairs, without a gradient, and the weight of the expert's output."""
    if isinstance(routing, Mixing):
        used_TE = jnp.where(tokens.valid_T[:, None], routing.scores_TE, 0)
        return jax.lax.stop_gradient(used_TE), used_TE
    is_TKE = routing.experts_TK[..., None] == jnp.arange(routing.scores_TE.shape[-1])
    is_TKE &= routing.chosen_TK[..., None]
    weight_TE = jnp.where(is_TKE, routing.weights_TK[..., None], 0).sum(1)
    return is_TKE.sum(1).astype(routing.scores_TE.dtype), weight_TE


def _entropy(scores_TE: Array, valid_T: Array, axes: Axes) -> Array:
    p_TE = scores_TE / jnp.maximum(scores_TE.sum(-1, keepdims=True), 1e-20)
    total, count = psum((-jax.scipy.special.xlogy(p_TE, p_TE).sum(), valid_T.sum(dtype=p_TE.dtype)), axes)
    return total / jnp.maximum(count, 1)
