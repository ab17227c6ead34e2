"""Capacity-limited dispatch: each expert has C slots per group of tokens; pairs beyond them are dropped.

Which pairs are dropped is defined per group, never per device: inside a group, first choices come before second ones,
then earlier sequence positions before later ones, then lower batch indices. Packing and unpacking are index gathers,
forward and backward, so that two runs agree bit for bit.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh import Axes
from ..types import SlotIndex


@dataclass(frozen=True)
class Slots:
    """C = ceil(capacity_factor * k * tokens_per_group / num_experts) slots per expert and group: the factor counts k."""

    capacity_factor: float = 1.25

    def __post_init__(self):
        if not self.capacity_factor > 0:
            raise ValueError(f"dispatch.capacity_factor must be positive, got {self.capacity_factor}")

    def capacity(self, k: int, tokens_per_group: int, num_experts: int) -> int:
        return max(1, math.ceil(self.capacity_factor * k * tokens_per_group / num_experts))


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


def _with_zero_row(x_ND: jax.Array) -> jax.Array:
    return jnp.concatenate([x_ND, jnp.zeros_like(x_ND[:1])])


@jax.custom_vjp
def pack(x_TD: jax.Array, where: SlotIndex) -> jax.Array:
    """Rows of x_TD in slot order [slots, D]; empty slots are zero."""
    K = where.slot_TK.shape[1]
    return _with_zero_row(x_TD)[where.pair_S // K]


def _pack_fwd(x_TD, where):
    return pack(x_TD, where), where


def _pack_bwd(where, g_SD):
    rows_TKD = _with_zero_row(g_SD)[where.slot_TK]
    wide = jnp.promote_types(g_SD.dtype, jnp.float32)
    return rows_TKD.astype(wide).sum(1).astype(g_SD.dtype), None


pack.defvjp(_pack_fwd, _pack_bwd)


@jax.custom_vjp
def unpack(y_SD: jax.Array, weights_TK: jax.Array, where: SlotIndex) -> jax.Array:
    """sum_k weights_TK * (row of y_SD in the pair's slot, zero if dropped), in at least float32, k in order."""
    rows_TKD = _with_zero_row(y_SD)[where.slot_TK].astype(weights_TK.dtype)
    return (weights_TK[..., None] * rows_TKD).sum(1)


def _unpack_fwd(y_SD, weights_TK, where):
    return unpack(y_SD, weights_TK, where), (y_SD, weights_TK, where)


def _unpack_bwd(saved, g_TD):
    y_SD, weights_TK, where = saved
    K = weights_TK.shape[1]
    weight_S = jnp.append(weights_TK.reshape(-1), jnp.zeros_like(weights_TK[0, 0]))[where.pair_S]
    gy_SD = weight_S[:, None] * _with_zero_row(g_TD)[where.pair_S // K]
    rows_TKD = _with_zero_row(y_SD)[where.slot_TK].astype(g_TD.dtype)
    return gy_SD.astype(y_SD.dtype), (rows_TKD * g_TD[:, None, :]).sum(-1), None


unpack.defvjp(_unpack_fwd, _unpack_bwd)
