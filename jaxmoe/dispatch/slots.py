"""Capacity-limited dispatch: each expert has C slots per group of tokens; pairs beyond them are dropped.

Which pairs are dropped is defined per group, never per device: inside a group, first choices come before second ones,
then earlier sequence positions before later ones, then lower batch indices.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ..collectives import all_gather, all_to_all, group_size, reduce_scatter
from ..experts import ExpertWeights, experts
from ..mesh import Roles
from ..routing import Router
from ..types import Axes, Groups, Mixing, Moved, Routing, RowIndex
from .rows import pack, unpack


@dataclass(frozen=True)
class Slots:
    """C = ceil(capacity_factor * k * tokens_per_group / num_experts) slots per expert and group.

    The factor counts k: 1.0 holds every pair of a balanced routing. A trainer that does not count k names k times ours.

    Example: ``moe = MoE(64, 128, 8, dispatch=Slots(capacity_factor=2.0), rngs=nnx.Rngs(0))``
    """

    capacity_factor: float = 1.25

    def __post_init__(self):
        if not self.capacity_factor > 0:
            raise ValueError(f"dispatch.capacity_factor must be positive, got {self.capacity_factor}")

    def capacity(self, router: Router, tokens_per_group: int, num_experts: int) -> int:
        pairs = router.pairs_per_token(num_experts) * tokens_per_group / num_experts
        most = router.most_per_expert(tokens_per_group, num_experts)
        return min(max(1, math.ceil(self.capacity_factor * pairs)), most)

    def __call__(
        self, x_TD, routing: Routing | Mixing, router: Router, groups: Groups, w: ExpertWeights, activation: str,
        roles: Roles,
    ) -> Moved:
        if isinstance(routing, Mixing):
            return soft(x_TD, routing, groups, w, activation, roles)
        E, D = routing.scores_TE.shape[1], x_TD.shape[1]
        by_group = lambda a: a.reshape(groups.local, -1, a.shape[1])  # noqa: E731
        where, dropped = index(by_group(routing.experts_TK), by_group(routing.chosen_TK), E,
                               self.capacity(router, groups.tokens, E), groups.axes)
        out_ECD = exchange(pack(x_TD, where).reshape(E, -1, D), w, activation, roles)
        return Moved(unpack(out_ECD.reshape(-1, D), routing.weights_TK, where), dropped)


def exchange(slots_ECD: jax.Array, w: ExpertWeights, activation: str, roles: Roles) -> jax.Array:
    """dispatch, expert_gather, experts, expert_reduce, combine."""
    rows_ECD = all_gather(all_to_all(slots_ECD, roles.expert, 0, 1), roles.expert_shard, 1)
    out_ECD = reduce_scatter(experts(rows_ECD, w, activation), roles.expert_shard, 1)
    return all_to_all(out_ECD, roles.expert, 1, 0)


def soft(x_TD, mixing: Mixing, groups: Groups, w: ExpertWeights, activation: str, roles: Roles) -> Moved:
    """Soft MoE: mix tokens into slots, exchange, mix slots into tokens. A group's devices share its slots out."""
    (_, _, E, C), D = mixing.pack_GNEC.shape, x_TD.shape[1]
    x_GND = x_TD.reshape(groups.local, -1, D)
    slots_CEGD = jnp.einsum("gnec,gnd->cegd", mixing.pack_GNEC.astype(x_TD.dtype), x_GND)
    padding = -C % group_size(groups.axes)
    slots_CEGD = reduce_scatter(jnp.pad(slots_CEGD, ((0, padding), (0, 0), (0, 0), (0, 0))), groups.axes)
    own = slots_CEGD.shape
    out_ECD = exchange(slots_CEGD.swapaxes(0, 1).reshape(E, -1, D), w, activation, roles)
    out_CEGD = all_gather(out_ECD.reshape(E, own[0], groups.local, D).swapaxes(0, 1), groups.axes)[:C]
    y_GND = jnp.einsum("gnec,cegd->gnd", mixing.unpack_GNEC.astype(out_CEGD.dtype), out_CEGD)
    return Moved(y_GND.reshape(x_TD.shape), 0 * jnp.isnan(x_TD[0, 0]).astype(jnp.int32))


def index(
    experts_GNK: jax.Array, chosen_GNK: jax.Array, num_experts: int, capacity: int, axes: Axes
) -> tuple[RowIndex, jax.Array]:
    """Assign slots; also the number of this device's pairs that get none.

    Tokens of a group are in priority order; `axes` split a group's tokens, in the same order. A device holds
    min(capacity, N) slots per expert and group, laid out as [E, G, slots].
    """
    G, N, K = experts_GNK.shape
    E, num_slots = num_experts, min(capacity, N)
    pairs_GKN = jnp.where(chosen_GNK, experts_GNK, E).transpose(0, 2, 1)
    counts_GKE = (pairs_GKN[..., None] == jnp.arange(E)).sum(2, dtype=jnp.int32)
    kept_GE = jnp.minimum(_kept(counts_GKE, capacity, axes), num_slots)
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
    return RowIndex(slot_TK, pair_GES.transpose(1, 0, 2).reshape(-1)), (counts_GE - kept_GE).sum()


def _kept(counts_GKE: jax.Array, capacity: int, axes: Axes) -> jax.Array:
    """How many of this device's pairs each expert keeps [G, E].

    Kept pairs are a prefix of this device's: if one of its pairs does not fit, no later one does.
    """
    totals_GKE, before_GKE = counts_GKE, jnp.zeros_like(counts_GKE)
    if axes:
        all_RGKE = jax.lax.all_gather(counts_GKE, axes)
        earlier_R = jnp.arange(all_RGKE.shape[0]) < jax.lax.axis_index(axes)
        totals_GKE = all_RGKE.sum(0)
        before_GKE = jnp.where(earlier_R[:, None, None, None], all_RGKE, 0).sum(0)
    before_GKE = before_GKE + jnp.cumsum(totals_GKE, 1) - totals_GKE
    return jnp.clip(capacity - before_GKE, 0, counts_GKE).sum(1)
