"""Dropless dispatch: every pair of a token and a choice reaches its expert, whatever the imbalance.

Shapes are static, so a device sends each other one a bucket of rows, sorted by expert. A bucket is `buffer_factor`
times what balanced routing needs; pairs that do not fit go in further rounds of the same size, as many as the fullest
bucket of the group asks for, usually none. So buffers are small, time follows the imbalance, and nothing is dropped.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..collectives import all_gather, all_to_all, pmax, reduce_scatter
from ..compat import vary_like
from ..experts import ExpertWeights, grouped_experts
from ..mesh import Roles
from ..routing import Router
from ..types import Groups, Mixing, Moved, Routing, RowIndex
from .rows import pack, unpack


@dataclass(frozen=True)
class Ragged:
    """Dropless: nothing is ever dropped.

    buffer_factor: rows of a bucket over those of a balanced routing. Larger ones need fewer rounds when routing is
    skewed, and more memory: `buffer_rows` tells how many rows a device receives in a round.

    Example: ``rows = Ragged().buffer_rows(tokens=4096, router=TopK(k=2), num_experts=64, devices=8)``
    """

    buffer_factor: float = 1.5

    def __post_init__(self):
        if not self.buffer_factor > 0:
            raise ValueError(f"dispatch.buffer_factor must be positive, got {self.buffer_factor}")

    def bucket_rows(self, tokens: int, router: Router, num_experts: int, devices: int) -> int:
        """Rows that a device with so many tokens sends to each of so many devices in one round.

        Never more than can go there: min(k, local experts) a token.
        """
        most = tokens * min(math.ceil(router.pairs_per_token(num_experts)), num_experts // devices)
        fair = tokens * router.pairs_per_token(num_experts) / devices
        return max(1, min(most, math.ceil(self.buffer_factor * fair / 8) * 8))

    def buffer_rows(self, tokens: int, router: Router, num_experts: int, devices: int, shards: int = 1) -> int:
        """Rows that a device holds in one round, with experts split over `shards` devices; times D * bytes each."""
        return self.bucket_rows(tokens, router, num_experts, devices) * devices * shards

    def __call__(
        self, x_TD, routing: Routing | Mixing, router: Router, groups: Groups, w: ExpertWeights, activation: str,
        roles: Roles,
    ) -> Moved:
        if isinstance(routing, Mixing):
            raise ValueError("dispatch Ragged needs a router that sends whole tokens, got Soft; use Slots")
        E, local = routing.scores_TE.shape[1], w.up_EDF.shape[0]
        bucket = self.bucket_rows(x_TD.shape[0], router, E, E // local)
        send = sort_pairs(routing, E, local)
        sizes_PE = all_to_all(send.sizes_E, roles.expert).reshape(-1, local)
        sizes_PE = all_gather(sizes_PE, roles.expert_shard)
        rounds = pmax(-(-send.fill_B.max() // bucket), (*roles.expert, *roles.expert_shard))
        w = vary_like(jax.tree.map(lambda a: a.astype(x_TD.dtype), w), x_TD)

        arguments = (x_TD, routing.weights_TK, w, send, sizes_PE)
        run = one_round(bucket, activation, roles)
        y_TD = all_rounds(run, rounds, *arguments) if bucket < send.most else run(0, *arguments)
        return Moved(y_TD, 0 * send.fill_B[0])


def one_round(bucket: int, activation: str, roles: Roles):
    """f(number, x_TD, weights_TK, w, send, sizes_PE): outputs of the pairs of one round, zero for others."""

    def run(number, x_TD, weights_TK, w, send, sizes_PE):
        where = window(send, number, bucket)
        rows_RD = all_gather(all_to_all(pack(x_TD, where), roles.expert), roles.expert_shard)
        sizes_PE = sizes_in_window(sizes_PE, number, bucket)
        sort = sort_rows(sizes_PE, bucket)
        out_RD = grouped_experts(pack(rows_RD, sort), sizes_PE.sum(0), w, activation)
        out_RD = reduce_scatter(pack(out_RD, inverse(sort)), roles.expert_shard)
        return unpack(all_to_all(out_RD, roles.expert), weights_TK, where)

    return run


def all_rounds(one_round, rounds, x_TD, weights_TK, w, send, sizes_PE):
    """Sum of rounds 0 ... rounds - 1. JAX cannot reverse a loop of unknown length, so the gradient is written out:
    it runs rounds but the first again, one by one."""

    @jax.custom_vjp
    def run(x_TD, weights_TK, w, *rest):
        return _more(one_round, 1, one_round(0, x_TD, weights_TK, w, *rest[:2]), x_TD, weights_TK, w, *rest)

    def fwd(x_TD, weights_TK, w, *rest):
        y_TD, pullback = jax.vjp(lambda *a: one_round(0, *a, *rest[:2]), x_TD, weights_TK, w)
        return _more(one_round, 1, y_TD, x_TD, weights_TK, w, *rest), (pullback, (x_TD, weights_TK, w, *rest))

    def bwd(saved, g_TD):
        pullback, arguments = saved
        return (*_more_gradients(one_round, 1, g_TD, pullback(g_TD), *arguments), None, None, None)

    run.defvjp(fwd, bwd)
    return run(x_TD, weights_TK, w, send, sizes_PE, rounds)


def further_rounds(one_round, first, rounds, y_TD, x_TD, weights_TK, w, send, sizes_PE):
    """Sum of rounds first ... rounds - 1, like y_TD; its gradient is as that of `all_rounds`."""

    @jax.custom_vjp
    def run(x_TD, weights_TK, w, send, sizes_PE, rounds):
        return _more(one_round, first, _zeros_like(y_TD), x_TD, weights_TK, w, send, sizes_PE, rounds)

    def bwd(arguments, g_TD):
        zeros = jax.tree.map(_zeros_like, arguments[:3])
        return (*_more_gradients(one_round, first, g_TD, zeros, *arguments), None, None, None)

    run.defvjp(lambda *arguments: (run(*arguments), arguments), bwd)
    return run(x_TD, weights_TK, w, send, sizes_PE, rounds)


def _more(one_round, first, y_TD, x_TD, weights_TK, w, send, sizes_PE, rounds):
    """y_TD and rounds first ... rounds - 1."""
    return jax.lax.fori_loop(first, rounds, lambda i, y: y + one_round(i, x_TD, weights_TK, w, send, sizes_PE), y_TD)


def _more_gradients(one_round, first, g_TD, grads, x_TD, weights_TK, w, send, sizes_PE, rounds):
    """grads, of x_TD, weights_TK and w, and those of rounds first ... rounds - 1."""

    def body(i, grads):
        _, pullback = jax.vjp(lambda *a: one_round(i, *a, send, sizes_PE), x_TD, weights_TK, w)
        return jax.tree.map(jnp.add, grads, pullback(g_TD))

    return jax.lax.fori_loop(first, rounds, body, grads)


def _zeros_like(a: jax.Array) -> jax.Array:
    return vary_like(jnp.zeros(a.shape, a.dtype), a)


class Send(NamedTuple):
    """Pairs sorted by expert; experts of a device are neighbours, so a bucket is a range of ranks.

    expert_TK: the pair's expert, or E if it has none. rank_TK: the pair's rank. order_P: the pair of a rank. sizes_E:
    pairs of each expert. first_B, fill_B: a bucket's first rank, and its pairs. bucket_TK: bucket of the pair.
    """

    used_TK: jax.Array
    rank_TK: jax.Array
    order_P: jax.Array
    sizes_E: jax.Array
    first_B: jax.Array
    fill_B: jax.Array
    bucket_TK: jax.Array

    @property
    def most(self) -> int:
        """Most pairs that one bucket can be asked to hold."""
        T, K = self.used_TK.shape
        return T * min(K, self.sizes_E.size // self.fill_B.size)


def sort_pairs(routing: Routing, num_experts: int, local: int) -> Send:
    """local: experts of one device."""
    T, K = routing.experts_TK.shape
    expert_P = jnp.where(routing.chosen_TK, routing.experts_TK, num_experts).reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    rank_P = jnp.argsort(order_P, stable=True)
    sizes_E = (expert_P[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    by_bucket = sizes_E.reshape(-1, local)
    first_B = (jnp.cumsum(sizes_E) - sizes_E).reshape(-1, local)[:, 0]
    bucket_P = jnp.minimum(expert_P, num_experts - 1) // local
    tk = lambda a: a.reshape(T, K)  # noqa: E731
    return Send(tk(expert_P < num_experts), tk(rank_P), order_P, sizes_E, first_B, by_bucket.sum(1), tk(bucket_P))


def window(send: Send, number, bucket: int) -> RowIndex:
    """Round `number`: pairs number * bucket and following of each bucket, laid out as [buckets, bucket]."""
    pairs, num_rows = send.order_P.size, send.fill_B.size * bucket
    place_TK = send.rank_TK - send.first_B[send.bucket_TK] - number * bucket
    here_TK = send.used_TK & (place_TK >= 0) & (place_TK < bucket)
    row_TK = jnp.where(here_TK, send.bucket_TK * bucket + place_TK, num_rows)
    places = number * bucket + np.arange(bucket)
    rank_BR = jnp.minimum(send.first_B[:, None] + places, pairs - 1)
    pair_BR = jnp.where(places < send.fill_B[:, None], send.order_P[rank_BR], pairs)
    return RowIndex(row_TK, pair_BR.reshape(-1))


def sizes_in_window(sizes_PE: jax.Array, number, bucket: int) -> jax.Array:
    """Rows of each local expert from each sender in round `number`."""
    ends_PE = jnp.clip(jnp.cumsum(sizes_PE, 1) - number * bucket, 0, bucket)
    return jnp.diff(ends_PE, axis=1, prepend=0)


def sort_rows(sizes_PE: jax.Array, bucket: int) -> RowIndex:
    """Index from buckets, each sorted by expert, to rows sorted by expert. A row is its own only choice."""
    senders, local = sizes_PE.shape
    ends_PE = jnp.cumsum(sizes_PE, 1)
    expert_R = (np.arange(bucket)[:, None] >= ends_PE[:, None, :]).sum(-1).reshape(-1)   # `local` = empty, sorts last
    order_R = jnp.argsort(expert_R, stable=True)
    rank_R = jnp.argsort(order_R, stable=True)
    rows = senders * bucket
    return RowIndex(jnp.where(expert_R < local, rank_R, rows)[:, None],
                    jnp.where(np.arange(rows) < sizes_PE.sum(), order_R, rows))


def inverse(where: RowIndex) -> RowIndex:
    """The index that undoes one with a single choice a row."""
    return RowIndex(where.pair_R[:, None], where.row_TK[:, 0])
