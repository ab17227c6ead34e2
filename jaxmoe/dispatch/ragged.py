"""Dropless dispatch: every pair of a token and a choice reaches its expert, whatever the imbalance.

Shapes are static: a device sends each other one a bucket of T * min(K, local experts) rows, the most that can go
there, and receives as many from each: T * min(K, local experts) * devices rows, of which usually T * K hold tokens.
Products cost only the rows in use; the exchange and the buffers cost the bound.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ..collectives import all_gather, all_to_all, reduce_scatter
from ..experts import ExpertWeights, grouped_experts
from ..mesh import Roles
from ..types import Routing, SlotIndex
from .rows import pack, unpack
from .slots import Groups, expert_loads


@dataclass(frozen=True)
class Ragged:
    """Dropless: nothing is ever dropped."""

    def __call__(
        self, x_TD, routing: Routing, valid_T, groups: Groups, w: ExpertWeights, activation: str, roles: Roles
    ):
        """Returns y_TD, dropped pairs (0), and the largest load of an expert in a group."""
        T, (E, local) = x_TD.shape[0], (routing.scores_TE.shape[1], w.up_EDF.shape[0])
        K = routing.experts_TK.shape[1]
        needed = expert_loads(routing, valid_T, groups, roles.sequence_axes).max()
        bucket = T * min(K, local)
        where, sizes_E = send_index(routing.experts_TK, valid_T, E, local, bucket)
        rows_RD = all_to_all(pack(x_TD, where), roles.expert)
        sizes_PE = all_to_all(sizes_E, roles.expert).reshape(-1, local)
        rows_RD, sizes_PE = all_gather(rows_RD, roles.expert_shard), all_gather(sizes_PE, roles.expert_shard)
        sort = sort_index(sizes_PE, bucket)
        out_RD = grouped_experts(pack(rows_RD, sort), sizes_PE.sum(0), w, activation)
        out_RD = unsort(out_RD, sort)
        out_RD = all_to_all(reduce_scatter(out_RD, roles.expert_shard), roles.expert)
        return unpack(out_RD, routing.weights_TK, where), where.dropped, needed


def send_index(experts_TK, valid_T, num_experts: int, local: int, bucket: int) -> tuple[SlotIndex, jax.Array]:
    """Pairs sorted by expert inside one bucket per device, and the pairs of each expert."""
    T, K = experts_TK.shape
    expert_P = jnp.where(valid_T[:, None], experts_TK, num_experts).reshape(-1)
    order_P = jnp.argsort(expert_P, stable=True)
    rank_P = jnp.argsort(order_P, stable=True)
    sizes_E = (expert_P[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)
    before_E = jnp.cumsum(sizes_E) - sizes_E
    first_B = before_E.reshape(-1, local)[:, 0]                        # rank of a bucket's first pair
    fill_B = sizes_E.reshape(-1, local).sum(1)
    home_P = jnp.minimum(expert_P, num_experts - 1) // local
    row_P = home_P * bucket + rank_P - first_B[home_P]
    num_rows = num_experts // local * bucket
    slot_P = jnp.where(expert_P < num_experts, row_P, num_rows)
    rank_BR = jnp.minimum(first_B[:, None] + np.arange(bucket), T * K - 1)
    pair_BR = jnp.where(np.arange(bucket) < fill_B[:, None], order_P[rank_BR], T * K)
    zero = 0 * sizes_E[0]                                              # varies over the same mesh axes as the sizes
    return SlotIndex(slot_P.reshape(T, K), pair_BR.reshape(-1), zero, zero), sizes_E


def sort_index(sizes_PE: jax.Array, bucket: int) -> SlotIndex:
    """Index from buckets, each sorted by expert, to rows sorted by expert. A row is its own only choice."""
    ends_PE = jnp.cumsum(sizes_PE, 1)
    expert_PR = (np.arange(bucket)[:, None] >= ends_PE[:, None, :]).sum(-1)
    expert_R = expert_PR.reshape(-1)                                   # number of experts = empty row, sorts last
    order_R = jnp.argsort(expert_R, stable=True)
    used = sizes_PE.sum()
    rank_R = jnp.argsort(order_R, stable=True)
    rows = expert_R.size
    slot_R1 = jnp.where(expert_R < sizes_PE.shape[1], rank_R, rows)[:, None]
    pair_R = jnp.where(np.arange(rows) < used, order_R, rows)
    return SlotIndex(slot_R1, pair_R, jnp.zeros_like(used), used)


def unsort(y_RD: jax.Array, sort: SlotIndex) -> jax.Array:
    """Undo `pack(., sort)`: packing by the inverse index."""
    return pack(y_RD, SlotIndex(sort.pair_S[:, None], sort.slot_TK[:, 0], sort.dropped, sort.needed))
