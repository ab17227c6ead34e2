"""The MoE layer: parameters, and the shard_map inside which verbs work on local arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .collectives import after, all_gather, turn
from .dispatch import Dispatch, Slots
from .experts import ExpertWeights, experts
from .mesh import Roles, axes_size
from .parameters import normal
from .plan.plan import Plan
from .planned import layer_plan, planned_layer
from .routing import Router, TopK, bias_update_rate, updated_bias
from .routing.losses import statistics
from .routing.tokens import outputs_of, tokens_of
from .spec import Group, Spec
from .types import Aux, Groups


class RouterBias(nnx.Variable):
    """The balancing bias of a router: state that the optimizer and its weight decay do not see."""


class MoE(nnx.Module):
    """Mixture-of-Experts feed-forward layer: y_BSD, aux = moe(x_BSD).

    mesh: None runs the same code on one device. roles: mesh axes of each role (see `Roles`).
    router: see `jaxmoe.routing`; `ExpertChoice` and `Soft` leak future tokens in causal models.
    dispatch: `Slots` (capacity, drops what does not fit) or `Ragged` (drops nothing).
    shared_experts: experts that every token goes to, beside the routed ones.
    group: capacity groups, "sequence" (each sequence is one) or n contiguous pieces of the global batch.
    load_balance: which formula, "switch", "hf", "megatron" or "deepseek_seq".
    dtype: compute type of the experts; parameters are float32, and routing is at least float32.
    schedule: None = no plan; a `Plan`, or a schedule's name, planned for the first shapes that come.

    Example: ``moe = MoE(64, 128, 8, router=TopK(k=2), rngs=nnx.Rngs(0)); y, aux = moe(jnp.ones((2, 16, 64)))``
    """

    def __init__(
        self, d_model: int, d_ff: int, num_experts: int, *, rngs: nnx.Rngs, router: Router = TopK(),
        dispatch: Dispatch = Slots(), activation: str = "swiglu", shared_experts: int = 0, mesh: Mesh | None = None,
        roles: Roles | None = None, group: Group = "sequence", load_balance: str = "switch", dtype: Any = jnp.float32,
        schedule: str | Plan | None = None,
    ):
        roles = roles if mesh is not None and roles is not None else Roles()
        self.spec = spec = Spec(d_model, d_ff, num_experts, router, dispatch, activation, mesh, roles, group,
                                load_balance, jnp.dtype(dtype))
        self.schedule = schedule
        weights = router.weights(d_model, num_experts)
        self.router = nnx.Dict({name: normal(rngs, w.shape, w.scale, mesh, mean=w.mean) for name, w in weights.items()})
        bias_E = normal(rngs, (num_experts,), 0.0, mesh)[...] if bias_update_rate(router) else None
        self.bias = None if bias_E is None else RouterBias(bias_E)
        into, out = d_model**-0.5, d_ff**-0.5
        specs: Any = spec.expert_specs
        columns, rows, gate = specs
        self.w_up_EDF = normal(rngs, (num_experts, d_model, d_ff), into, mesh, columns)
        self.w_down_EFD = normal(rngs, (num_experts, d_ff, d_model), out, mesh, rows)
        self.w_gate_EDF = normal(rngs, (num_experts, d_model, d_ff), into, mesh, gate) if gate is not None else None
        self.shared = SharedExperts(spec, shared_experts, rngs) if shared_experts else None

    def __call__(
        self, x_BSD, token_mask=None, segment_ids=None, forced_experts=None, key=None
    ) -> tuple[jax.Array, Aux]:
        """token_mask: [B, S] bool, False = padding: its output is 0, and nothing else depends on it.

        segment_ids: [B, S] int, documents of a packed sequence, for per-document statistics. forced_experts: [B, S, K]
        int, -1 = the router chooses. key: for routers with noise; None = no noise.
        """
        weights = ExpertWeights(self.w_up_EDF[...], self.w_down_EFD[...], _value(self.w_gate_EDF))
        router = {name: w[...] for name, w in self.router.items()}
        y_BSD, aux = apply(self.spec, router, weights, x_BSD, token_mask, segment_ids, forced_experts,
                           _value(self.bias), key, self.schedule)
        if self.shared is not None:
            y_BSD = y_BSD + self.shared(x_BSD, token_mask)
        return y_BSD, aux

    def update_bias(self, tokens_per_expert: jax.Array) -> None:
        """Move the balancing bias, once an optimizer step. tokens_per_expert: (E,), of the step's global batch."""
        if self.bias is not None:
            self.bias[...] = updated_bias(self.bias[...], tokens_per_expert, bias_update_rate(self.spec.router))


class SharedExperts(nnx.Module):
    """Experts that every token goes to; computed where the token is."""

    def __init__(self, spec: Spec, count: int, rngs: nnx.Rngs):
        D, F, mesh, stored = spec.d_model, spec.d_ff, spec.mesh, spec.roles.fsdp
        self.spec = spec
        self.w_up_EDF = normal(rngs, (count, D, F), D**-0.5, mesh, P(None, stored))
        self.w_down_EFD = normal(rngs, (count, F, D), F**-0.5, mesh, P(None, None, stored))
        gated = spec.activation == "swiglu"
        self.w_gate_EDF = normal(rngs, (count, D, F), D**-0.5, mesh, P(None, stored)) if gated else None

    def __call__(self, x_BSD, token_mask=None):
        w = ExpertWeights(self.w_up_EDF[...], self.w_down_EFD[...], _value(self.w_gate_EDF))
        return shared_experts(x_BSD, token_mask, w, self.spec)


def shared_experts(x_BSD, token_mask, w: ExpertWeights, spec: Spec):
    """Sum of experts that every token goes to. As in routing, padding gives 0, and what is not finite NaN, alone."""
    finite_BS1 = jnp.isfinite(x_BSD).all(-1, keepdims=True)
    mask_BS1 = jnp.ones_like(finite_BS1) if token_mask is None else token_mask[..., None].astype(bool)
    x_TD = jnp.where(mask_BS1 & finite_BS1, x_BSD, 0).reshape(-1, x_BSD.shape[-1]).astype(spec.dtype)
    y_ETD = experts(jnp.broadcast_to(x_TD, (w.up_EDF.shape[0], *x_TD.shape)), w, spec.activation)
    y_BSD = y_ETD.sum(0).reshape(x_BSD.shape).astype(x_BSD.dtype)
    return jnp.where(mask_BS1, jnp.where(finite_BS1, y_BSD, jnp.nan), 0)


def _value(param):
    return None if param is None else param[...]


def apply(
    spec: Spec, router: dict[str, jax.Array], w: ExpertWeights, x_BSD, token_mask=None, segment_ids=None,
    forced_experts=None, bias_E=None, key=None, schedule: str | Plan | None = None,
) -> tuple[jax.Array, Aux]:
    """The functional core. Pads batch and sequence to the mesh, and opens the one shard_map."""
    B, S = _check_inputs(spec, x_BSD, token_mask, segment_ids, forced_experts)
    roles, mesh = spec.roles, spec.mesh
    shards, sequence_shards = axes_size(mesh, roles.batch_axes), axes_size(mesh, roles.sequence_axes)
    extra = ((0, -B % shards), (0, -S % sequence_shards))
    groups = spec.groups(B, S)
    mask_BS = jnp.ones((B, S), bool) if token_mask is None else token_mask.astype(bool)
    by_token = {
        "x": x_BSD, "mask": mask_BS, "index": jnp.arange(B * S).reshape(B, S),
        "segment": jnp.zeros((B, S), jnp.int32) if segment_ids is None else segment_ids, "forced": forced_experts,
    }
    by_token = {name: jnp.pad(a, (*extra, *((0, 0),) * (a.ndim - 2))) for name, a in by_token.items() if a is not None}
    body = partial(_local, spec, groups)
    if schedule is not None:
        plan = layer_plan(schedule, spec, B, S) if isinstance(schedule, str) else schedule
        body = partial(planned_layer, plan, spec, groups)
    if mesh is not None:
        tokens = P(roles.batch_axes, roles.sequence_axes)
        up, down, gate = spec.expert_specs
        whole = jax.tree.map(lambda _: P(), (router, bias_E, key))
        in_specs = (*whole, ExpertWeights(up, down, gate), jax.tree.map(lambda _: tokens, by_token))
        body = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=(tokens, P()), check_vma=True)
    y_BSD, aux = body(router, bias_E, key, w, by_token)
    return y_BSD[:B, :S], aux


def _check_inputs(spec: Spec, x_BSD, token_mask, segment_ids, forced_experts) -> tuple[int, int]:
    if x_BSD.ndim != 3 or x_BSD.shape[2] != spec.d_model or x_BSD.size == 0:
        raise ValueError(f"x must have shape (batch, sequence, {spec.d_model}) and a token, got {x_BSD.shape}")
    B, S, _ = x_BSD.shape
    choices = getattr(spec.router, "k", None)
    for name, array, want in (("token_mask", token_mask, (B, S)), ("segment_ids", segment_ids, (B, S)),
                              ("forced_experts", forced_experts, (B, S, choices))):
        if array is not None and array.shape != want:
            raise ValueError(f"{name} must have shape {want}, got {array.shape}")
    return B, S


def _local(spec: Spec, groups: Groups, router, bias_E, key, w: ExpertWeights, by_token) -> tuple[jax.Array, Aux]:
    """One device's part: route, then what the dispatch does, then statistics."""
    x_BSD = by_token["x"]
    tokens, bad_T = tokens_of(by_token, groups)
    routing = spec.router(router, tokens, groups, bias_E, key)
    w = _gathered(w, spec.roles.expert_fsdp)
    y_TD, dropped = spec.dispatch(tokens.x_TD.astype(spec.dtype), routing, spec.router, groups, w, spec.activation,
                                  spec.roles)
    fair_load = spec.router.pairs_per_token(spec.num_experts) * groups.tokens / spec.num_experts
    if spec.in_turn:
        routing = after(routing, turn(y_TD))
    aux = statistics(routing, tokens, groups, dropped, bad_T.sum(), spec.load_balance, spec.roles.token_axes, fair_load)
    return outputs_of(y_TD, tokens.valid_T, bad_T, x_BSD.shape[:2], groups).astype(x_BSD.dtype), aux


def _gathered(w: ExpertWeights, axes) -> ExpertWeights:
    """Expert weights whole over the axes that only store them."""
    gate_EDF = None if w.gate_EDF is None else all_gather(w.gate_EDF, axes, 1)
    return ExpertWeights(all_gather(w.up_EDF, axes, 1), all_gather(w.down_EFD, axes, 2), gate_EDF)
