"""The MoE layer: parameters, and the shard_map inside which verbs work on local arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .collectives import all_gather, pmax, psum
from .dispatch import Ragged, Slots
from .dispatch.slots import Groups
from .experts import ACTIVATIONS, ExpertWeights, experts
from .mesh import Roles, axes_size
from .parameters import normal
from .routing import TopK, load_balance, router_z
from .types import Aux


@dataclass(frozen=True)
class Spec:
    """Everything of a layer that is known before it runs."""

    num_experts: int
    router: TopK
    dispatch: Slots | Ragged
    activation: str
    roles: Roles
    group: Literal["sequence"] | int
    dtype: jnp.dtype


class MoE(nnx.Module):
    """Mixture-of-Experts feed-forward layer: y_BSD, aux = moe(x_BSD).

    mesh: None runs the same code on one device. roles: mesh axes of each role (see `Roles`).
    group: capacity groups, "sequence" (each sequence is one) or n contiguous pieces of the global batch.
    dtype: compute type of the experts; parameters are float32, and routing is at least float32.

    Example: ``moe = MoE(64, 128, 8, router=TopK(k=2), rngs=nnx.Rngs(0)); y, aux = moe(jnp.ones((2, 16, 64)))``
    """

    def __init__(
        self, d_model: int, d_ff: int, num_experts: int, *, rngs: nnx.Rngs, router: TopK = TopK(),
        dispatch: Slots | Ragged = Slots(), activation: str = "swiglu", shared_experts: int = 0,
        mesh: Mesh | None = None, roles: Roles | None = None, group: Literal["sequence"] | int = "sequence",
        dtype=jnp.float32,
    ):
        roles = roles if mesh is not None and roles is not None else Roles()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
        for what, size, axes in (("num_experts", num_experts, roles.expert), ("d_ff", d_ff, roles.expert_shard),
                                 ("d_model", d_model, roles.fsdp)):
            if size % axes_size(mesh, axes):
                raise ValueError(f"{what} must be divisible by {axes_size(mesh, axes)}, the size of mesh axes {axes}; "
                                 f"got {size}")
        self.mesh = mesh
        self.spec = Spec(num_experts, router, dispatch, activation, roles, group, jnp.dtype(dtype))
        into, out = d_model**-0.5, d_ff**-0.5
        columns = P(roles.expert, roles.expert_fsdp, roles.expert_shard)
        rows = P(roles.expert, roles.expert_shard, roles.expert_fsdp)
        gated = activation == "swiglu"
        self.w_router_DE = normal(rngs, (d_model, num_experts), into, mesh, P(roles.fsdp))
        self.w_up_EDF = normal(rngs, (num_experts, d_model, d_ff), into, mesh, columns)
        self.w_down_EFD = normal(rngs, (num_experts, d_ff, d_model), out, mesh, rows)
        self.w_gate_EDF = normal(rngs, (num_experts, d_model, d_ff), into, mesh, columns) if gated else None
        shared = (shared_experts, d_model, d_ff)
        self.shared_up_EDF = normal(rngs, shared, into, mesh) if shared_experts else None
        self.shared_down_EFD = normal(rngs, (shared_experts, d_ff, d_model), out, mesh) if shared_experts else None
        self.shared_gate_EDF = normal(rngs, shared, into, mesh) if shared_experts and gated else None

    def __call__(self, x_BSD, token_mask=None, forced_experts=None) -> tuple[jax.Array, Aux]:
        """token_mask: [B, S] bool, False = padding. forced_experts: [B, S, K] int, -1 = the router chooses."""
        weights = ExpertWeights(self.w_up_EDF[...], self.w_down_EFD[...], _value(self.w_gate_EDF))
        y_BSD, aux = apply(self.spec, self.mesh, self.w_router_DE[...], weights, x_BSD, token_mask, forced_experts)
        if self.shared_up_EDF is not None and self.shared_down_EFD is not None:
            shared = ExpertWeights(self.shared_up_EDF[...], self.shared_down_EFD[...], _value(self.shared_gate_EDF))
            y_BSD = y_BSD + _shared(x_BSD.astype(self.spec.dtype), shared, self.spec.activation).astype(y_BSD.dtype)
            if token_mask is not None:
                y_BSD = jnp.where(token_mask[..., None], y_BSD, 0)
        return y_BSD, aux


def _value(param):
    return None if param is None else param[...]


def _shared(x_BSD, w: ExpertWeights, activation: str):
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    rows_ECD = jnp.broadcast_to(x_TD, (w.up_EDF.shape[0], *x_TD.shape))
    return experts(rows_ECD, w, activation).sum(0).reshape(x_BSD.shape)


def apply(spec: Spec, mesh, w_router_DE, w: ExpertWeights, x_BSD, token_mask=None, forced_BSK=None):
    """The functional core. Pads batch and sequence to the mesh, and opens the one shard_map."""
    roles, (B, S, _) = spec.roles, x_BSD.shape
    if B * S == 0:
        raise ValueError(f"x must hold at least one token, got shape {x_BSD.shape}")
    mask_BS = jnp.ones((B, S), bool) if token_mask is None else token_mask
    for name, array, want in (("token_mask", mask_BS, (B, S)), ("forced_experts", forced_BSK, (B, S, spec.router.k))):
        if array is not None and array.shape != want:
            raise ValueError(f"{name} must have shape {want}, got {array.shape}")
    forced_BSK = jnp.full((B, S, spec.router.k), -1) if forced_BSK is None else forced_BSK
    shards = axes_size(mesh, roles.batch_axes)
    if spec.group != "sequence" and (B % spec.group or spec.group % shards):
        raise ValueError(
            f"moe.group must divide the batch {B} and be a multiple of its {shards} shards, got {spec.group}"
        )
    tokens_per_group = S if spec.group == "sequence" else B * S // spec.group
    extra = (-B % shards, -S % axes_size(mesh, roles.sequence_axes))
    pad = lambda a, fill=0: jnp.pad(a, [(0, extra[0]), (0, extra[1])] + [(0, 0)] * (a.ndim - 2), constant_values=fill)  # noqa: E731
    groups = (B + extra[0] if spec.group == "sequence" else spec.group) // shards
    body = partial(_local, spec, Groups(groups, tokens_per_group))
    args = (w_router_DE, w, pad(x_BSD), pad(mask_BS), pad(forced_BSK, -1))
    if mesh is not None:
        columns = P(roles.expert, roles.expert_fsdp, roles.expert_shard)
        rows = P(roles.expert, roles.expert_shard, roles.expert_fsdp)
        weights: Any = (columns, rows, None if w.gate_EDF is None else columns)
        tokens = P(roles.batch_axes, roles.sequence_axes)
        body = jax.shard_map(body, mesh=mesh, in_specs=(P(roles.fsdp), ExpertWeights(*weights), tokens, tokens, tokens),
                             out_specs=(tokens, P()), check_vma=True)
    y_BSD, aux = body(*args)
    return y_BSD[:B, :S], aux


def _local(spec: Spec, groups: Groups, w_router_DE, w, x_BSD, mask_BS, forced_BSK):
    """One device's part, in the verbs' order."""
    roles, (B, S, D) = spec.roles, x_BSD.shape
    fair_load = spec.router.k * groups.tokens / spec.num_experts
    by_group = lambda a: a.reshape(groups.local, -1, S, a[0, 0].size).swapaxes(1, 2).reshape(B * S, -1)  # noqa: E731
    x_TD, valid_T, forced_TK = by_group(x_BSD), by_group(mask_BS)[:, 0], by_group(forced_BSK)
    x_TD = jnp.where(valid_T[:, None], x_TD, 0)   # what padding holds must not matter, NaN included
    wide = jnp.promote_types(x_TD.dtype, jnp.float32)
    logits_TE = x_TD.astype(wide) @ all_gather(w_router_DE, roles.fsdp).astype(wide)
    routing = spec.router(logits_TE, forced_TK)

    y_TD, dropped, needed = spec.dispatch(x_TD.astype(spec.dtype), routing, valid_T, groups,
                                          _gathered(w, roles.expert_fsdp), spec.activation, roles)
    y_BSD = y_TD.astype(x_BSD.dtype).reshape(groups.local, S, -1, D).swapaxes(1, 2).reshape(B, S, D)
    return y_BSD, _statistics(routing, valid_T, dropped, needed / fair_load, roles.token_axes)


def _gathered(w: ExpertWeights, axes) -> ExpertWeights:
    """Expert weights whole over the axes that only store them."""
    gate_EDF = None if w.gate_EDF is None else all_gather(w.gate_EDF, axes, 1)
    return ExpertWeights(all_gather(w.up_EDF, axes, 1), all_gather(w.down_EFD, axes, 2), gate_EDF)


def _statistics(routing, valid_T, dropped, needed, axes) -> Aux:
    E = routing.scores_TE.shape[-1]
    dtype = routing.scores_TE.dtype
    chosen_TKE = (routing.experts_TK[..., None] == jnp.arange(E)) & valid_T[:, None, None]
    scores_TE = jnp.where(valid_T[:, None], routing.scores_TE, 0)
    pairs_E, dropped = psum((chosen_TKE.sum((0, 1)).astype(dtype), dropped.astype(dtype)), axes)
    score_sum_E, num_tokens = psum((scores_TE.sum(0), valid_T.sum().astype(dtype)), axes)
    p_TE = scores_TE / jnp.maximum(scores_TE.sum(-1, keepdims=True), 1e-20)
    entropy = -psum(jax.scipy.special.xlogy(p_TE, jnp.maximum(p_TE, 1e-20)).sum(), axes)
    pairs = jnp.maximum(pairs_E.sum(), 1)
    metrics = {
        "max_over_mean_load": pairs_E.max() * E / pairs,
        "dead_experts": (pairs_E == 0).sum(),
        "router_entropy": entropy / jnp.maximum(num_tokens, 1),
        "sufficient_capacity_factor": pmax(needed, axes),
    }
    losses = {
        "load_balance": load_balance(pairs_E, score_sum_E, num_tokens),
        "router_z": router_z(routing.logits_TE, valid_T, num_tokens, axes),
    }
    return Aux(losses, pairs_E, dropped / pairs, jax.lax.stop_gradient(metrics))
