"""Losses and statistics of routing, exact over the global batch whatever its sharding.

Each is a function of sums over tokens. All sums of a layer are reduced over devices in one small all-reduce, and only
then multiplied: products of local means would depend on the mesh.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..collectives import all_gather, pmax, psum
from ..types import Array, Aux, Axes, Groups, Mixing, Routing, Tokens

Sums = dict[str, Array]


class Usage(NamedTuple):
    """What routing does with each token, zero where a token is not valid.

    pairs_TE: pairs of token and expert, no gradient. weight_TE: weights of experts' outputs. scores_TE: see `Routing`.
    """

    pairs_TE: Array
    weight_TE: Array
    scores_TE: Array


def usage_of(routing: Routing | Mixing, valid_T: Array) -> Usage:
    scores_TE = jnp.where(valid_T[:, None], routing.scores_TE, 0)
    if isinstance(routing, Mixing):
        return Usage(jax.lax.stop_gradient(scores_TE), scores_TE, scores_TE)
    is_TKE = routing.experts_TK[..., None] == jnp.arange(routing.scores_TE.shape[-1])
    is_TKE &= routing.chosen_TK[..., None]
    weight_TE = jnp.where(is_TKE, routing.weights_TK[..., None], 0).sum(1)
    return Usage(is_TKE.sum(1).astype(scores_TE.dtype), weight_TE, scores_TE)


def switch(sums: Sums) -> Array:
    """E * sum_e f_e P_e; f_e = share of pairs sent to e, before drops (sums to 1); P_e = mean score of e.

    1 when routing is uniform, up to E. (Switch Transformer, arXiv:2101.03961, eq. 4; Megatron's for any k.)
    """
    pairs_E, tokens = sums["pairs_E"], jnp.maximum(sums["tokens"], 1)
    return pairs_E.size * (pairs_E / jnp.maximum(pairs_E.sum(), 1) * sums["scores_E"] / tokens).sum()


def hf(sums: Sums) -> Array:
    """As `switch`, but f_e sums to k: the loss is k when routing is uniform (Hugging Face's Mixtral, one layer)."""
    return switch(sums) * sums["pairs_E"].sum() / jnp.maximum(sums["tokens"], 1)


def deepseek_seq(sums: Sums) -> Array:
    """Mean over documents of sum_e f_e P_e within the document; f_e sums to E, P_e is the mean of normalised scores.

    A document is a sequence, or one segment of a packed one. (DeepSeek-V3, arXiv:2412.19437, eqs. 17-20.)
    """
    return sums["document_balance"] / jnp.maximum(sums["documents"], 1)


LOAD_BALANCE: dict[str, Callable[[Sums], Array]] = {
    "switch": switch, "megatron": switch, "hf": hf, "deepseek_seq": deepseek_seq,
}


def router_z(sums: Sums) -> Array:
    """Mean of logsumexp(logits)^2 over valid tokens (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return sums["z"] / jnp.maximum(sums["tokens"], 1)


def importance(sums: Sums) -> Array:
    """Squared coefficient of variation of the experts' summed weights (Shazeer 2017, arXiv:1701.06538, eq. 7)."""
    return sums["weight_E"].var() / jnp.maximum(sums["weight_E"].mean() ** 2, 1e-20)


def statistics(
    routing: Routing | Mixing, tokens: Tokens, groups: Groups, dropped: Array, nonfinite: Array, balance: str,
    axes: Axes, fair_load: float,
) -> Aux:
    """Losses and metrics, the same on every device. fair_load: pairs of an expert in a group if all had as many."""
    local = tally(routing, tokens, groups, dropped, nonfinite, balance)
    return conclusions(total(local, groups, axes), balance, fair_load)


def tally(
    routing: Routing | Mixing, tokens: Tokens, groups: Groups, dropped: Array, nonfinite: Array, balance: str,
) -> Sums:
    """One device's sums over its tokens, and loads_GE, the pairs of each group."""
    usage = usage_of(routing, tokens.valid_T)
    dtype = usage.scores_TE.dtype
    p_TE = usage.scores_TE / jnp.maximum(usage.scores_TE.sum(-1, keepdims=True), 1e-20)
    sums = {
        "pairs_E": usage.pairs_TE.sum(0), "weight_E": usage.weight_TE.sum(0), "scores_E": usage.scores_TE.sum(0),
        "tokens": tokens.valid_T.sum(dtype=dtype), "dropped": dropped.astype(dtype),
        "nonfinite": nonfinite.astype(dtype),
        "z": jnp.where(tokens.valid_T, jax.nn.logsumexp(routing.logits_TE, -1) ** 2, 0).sum(),
        "entropy": -jax.scipy.special.xlogy(p_TE, jax.lax.stop_gradient(p_TE)).sum(),
        "loads_GE": usage.pairs_TE.reshape(groups.local, -1, usage.pairs_TE.shape[1]).sum(1),
    }
    if LOAD_BALANCE[balance] is deepseek_seq:
        sums |= _documents(usage.pairs_TE, p_TE, tokens, groups)
    return sums


def total(local: Sums, groups: Groups, axes: Axes) -> Sums:
    """Sums over all devices in one small all-reduce, and "largest_load", a maximum over them."""
    local = dict(local)
    loads_GE = psum(jax.lax.stop_gradient(local.pop("loads_GE")), groups.axes)
    vector, back = ravel_pytree(local)
    return back(psum(vector, axes)) | {"largest_load": pmax(loads_GE.max(), axes)}


def conclusions(sums: Sums, balance: str, fair_load: float) -> Aux:
    """Losses and metrics, from sums over all devices."""
    pairs = jnp.maximum(sums["pairs_E"].sum(), 1)
    losses = {"load_balance": LOAD_BALANCE[balance](sums), "router_z": router_z(sums), "importance": importance(sums)}
    metrics = {
        "dropped_pairs": sums["dropped"],
        "nonfinite_tokens": sums["nonfinite"],
        "max_over_mean_load": sums["pairs_E"].max() * sums["pairs_E"].size / pairs,
        "dead_experts": (sums["pairs_E"] == 0).sum(),
        "router_entropy": sums["entropy"] / jnp.maximum(sums["tokens"], 1),
        "sufficient_capacity_factor": sums["largest_load"] / fair_load,
    }
    return Aux(losses, sums["pairs_E"], sums["dropped"] / pairs, jax.lax.stop_gradient(metrics))


def _documents(pairs_TE: Array, p_TE: Array, tokens: Tokens, groups: Groups) -> Sums:
    """Sums for `deepseek_seq`.

    With c the pairs and p the normalised scores of a token, and n the length of its document, a document's loss is
    E / (pairs n) sum_t c_t . (sum of p over the document): a mask of token pairs stands in for a list of documents.
    """

    def by_sequence(a):
        a = a.reshape(groups.local, -1, groups.sequences, *a.shape[1:]).swapaxes(1, 2)
        return a.reshape(-1, *a.shape[2:])

    def everywhere(a: Array) -> Array:
        return all_gather(a, groups.axes, 1)

    pairs_BSE, p_BSE = by_sequence(pairs_TE), by_sequence(p_TE)
    valid_BS, segment_BS = by_sequence(tokens.valid_T), by_sequence(tokens.segment_T)
    same_BST = valid_BS[:, :, None] & (segment_BS[:, :, None] == everywhere(segment_BS)[:, None])
    same_BST = (same_BST & everywhere(valid_BS)[:, None]).astype(p_TE.dtype)
    length_BS = jnp.maximum(same_BST.sum(-1), 1)
    document_pairs_BS = jnp.maximum(jnp.einsum("bst,bt->bs", same_BST, everywhere(pairs_BSE.sum(-1))), 1)
    document_p_BSE = jnp.einsum("bst,bte->bse", same_BST, everywhere(p_BSE))
    balance_BS = (pairs_BSE * document_p_BSE).sum(-1) * pairs_TE.shape[1] / (document_pairs_BS * length_BS)
    return {"document_balance": balance_BS.sum(), "documents": (valid_BS / length_BS).sum()}
