"""Capacity-limited dispatch: each expert has C slots per group of tokens; pairs beyond them are dropped.

Which pairs are dropped is defined per group, never per device: inside a group, first choices come before second ones,
then earlier sequence positions before later ones, then lower batch indices. Packing and unpacking are index gathers,
forward and backward, so that two runs agree bit for bit.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..collectives import all_gather, all_to_all, psum, reduce_scatter
from ..experts import ExpertWeights, experts
from ..mesh import Axes, Roles
from ..types import Routing, SlotIndex
from .rows import pack, unpack


class Groups(NamedTuple):
    """Capacity groups. local: groups on one device; tokens: tokens of a group, on all devices that share it."""

    local: int
    tokens: int


@dataclass(frozen=True)
class Slots:
    """C = ceil(capacity_factor * k * tokens_per_group / num_experts) slots per expert and group.

    The factor counts k: 1.0 holds every pair of a balanced routing.
    """

    capacity_factor: float = 1.25

    def __post_init__(self):
        if not self.capacity_factor > 0:
            raise ValueError(f"dispatch.capacity_factor must be positive, got {self.capacity_factor}")

    def capacity(self, k: int, tokens_per_group: int, num_experts: int) -> int:
        return max(1, math.ceil(self.capacity_factor * k * tokens_per_group / num_experts))

    def __call__(
        self, x_TD, routing: Routing, valid_T, groups: Groups, w: ExpertWeights, activation: str, roles: Roles
    ):
        """Returns y_TD, this device's dropped pairs, and the largest load of an expert in a group."""
        (E, D), K = (routing.scores_TE.shape[1], x_TD.shape[1]), routing.experts_TK.shape[1]
        experts_GNK = routing.experts_TK.reshape(groups.local, -1, K)
        where = index(experts_GNK, valid_T.reshape(groups.local, -1), E, self.capacity(K, groups.tokens, E),
                      roles.sequence_axes)
        out_ECD = exchange(pack(x_TD, where).reshape(E, -1, D), w, activation, roles)
        return unpack(out_ECD.reshape(-1, D), routing.weights_TK, where), where.dropped, where.needed


def exchange(slots_ECD: jax.Array, w: ExpertWeights, activation: str, roles: Roles) -> jax.Array:
    """dispatch, expert_gather, experts, expert_reduce, combine."""
    (E, C, D), local = slots_ECD.shape, w.up_EDF.shape[0]
    rows_ECD = all_to_all(slots_ECD, roles.expert).reshape(-1, local, C, D).swapaxes(0, 1).reshape(local, -1, D)
    rows_ECD = all_gather(rows_ECD, roles.expert_shard, 1)
    out_ECD = reduce_scatter(experts(rows_ECD, w, activation), roles.expert_shard, 1)
    out_ECD = out_ECD.reshape(local, -1, C, D).swapaxes(0, 1).reshape(E, C, D)
    return all_to_all(out_ECD, roles.expert)


def expert_loads(routing: Routing, valid_T: jax.Array, groups: Groups, axes: Axes) -> jax.Array:
    """Pairs of each expert in each group [G, E]."""
    E = routing.scores_TE.shape[1]
    chosen_TKE = (routing.experts_TK[..., None] == jnp.arange(E)) & valid_T[:, None, None]
    return psum(chosen_TKE.reshape(groups.local, -1, E).sum(1, dtype=jnp.int32), axes)


def index(experts_GNK: jax.Array, valid_GN: jax.Array, num_experts: int, capacity: int, axes: Axes) -> SlotIndex:
    """Assign slots. Tokens of a group are in priority order; `axes` split a group's tokens, in the same order.

    A device holds min(capacity, N) slots per expert and group, laid out as [E, G, slots].
    """
    G, N, K = experts_GNK.shape
    E, num_slots = num_experts, min(capacity, N)
    pairs_GKN = jnp.where(valid_GN[:, None, :], experts_GNK.transpose(0, 2, 1), E)
    counts_GKE = (pairs_GKN[..., None] == jnp.arange(E)).sum(2, dtype=jnp.int32)
    kept_GE, needed = _kept(counts_GKE, capacity, axes)
    kept_GE = jnp.minimum(kept_GE, num_slots)
    counts_GE = counts_GKE.sum(1)
    start_GE = jnp.cumsum(counts_GE, -1) - counts_GE
    pairs_GP = pairs_GKN.reshape(G, K * N)
    order_GP = jnp.argsort(pairs_GP, -1, stable=True)
    rank_GP = jnp.argsort(order_GP, -1, stable=True)

    safe_GP = jnp.minimum(pairs_GP, E - 1)
    place_GP = rank_GP - jnp.take_along_axis(start_GE, safe_GP, 1)
    fits_GP = (pairs_GP < E) & (place_GP < jnp.take_along_axis(kept_GE, safe_GP, 1))
    slot_GP = (safe_GP * G + np.arange(G)[:, None]) * num_slots + place_GP
    slot_GP = jnp.where(fits_GP, slot_GP, E * G * num_slots)
    slot_TK = slot_GP.reshape(G, K, N).transpose(0, 2, 1).reshape(G * N, K)

    slots = np.arange(num_slots)
    source_GES = jnp.minimum(start_GE[..., None] + slots, K * N - 1)
    pair_GES = jnp.take_along_axis(order_GP, source_GES.reshape(G, -1), 1).reshape(source_GES.shape)
    token_GES = np.arange(G)[:, None, None] * N + pair_GES % N
    pair_GES = jnp.where(slots < kept_GE[..., None], token_GES * K + pair_GES // N, G * N * K)
    pair_S = pair_GES.transpose(1, 0, 2).reshape(-1)
    return SlotIndex(slot_TK, pair_S, (counts_GE - kept_GE).sum(), needed)


def _kept(counts_GKE: jax.Array, capacity: int, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """How many of this device's pairs each expert keeps, and the largest load of an expert in a group.

    Kept pairs are a prefix of this device's: if one of its pairs does not fit, no later one does.
    """
    totals_GKE, before_GKE = counts_GKE, jnp.zeros_like(counts_GKE)
    if axes:
        all_RGKE = jax.lax.all_gather(counts_GKE, axes)
        earlier_R = jnp.arange(all_RGKE.shape[0]) < jax.lax.axis_index(axes)
        totals_GKE = all_RGKE.sum(0)
        before_GKE = jnp.where(earlier_R[:, None, None, None], all_RGKE, 0).sum(0)
    before_GKE = before_GKE + jnp.cumsum(totals_GKE, 1) - totals_GKE
    kept_GE = jnp.clip(capacity - before_GKE, 0, counts_GKE).sum(1)
    return kept_GE, totals_GKE.sum(1).max()
