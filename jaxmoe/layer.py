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

from .collectives import all_gather
from .dispatch import Dispatch, Ragged, Slots
from .experts import ACTIVATIONS, ExpertWeights, experts
from .mesh import Roles, axes_size
from .parameters import normal
from .routing import Router, Soft, TopK, bias_update_rate, updated_bias
from .routing.losses import LOAD_BALANCE, statistics
from .types import Aux, Groups, Tokens

Group = Literal["sequence"] | int


class RouterBias(nnx.Variable):
    """The balancing bias of a router: state that the optimizer and its weight decay do not see."""


@dataclass(frozen=True)
class Spec:
    """Everything of a layer that is known before it runs."""

    d_model: int
    d_ff: int
    num_experts: int
    router: Router = TopK()
    dispatch: Dispatch = Slots()
    activation: str = "swiglu"
    mesh: Mesh | None = None
    roles: Roles = Roles()
    group: Group = "sequence"
    load_balance: str = "switch"
    dtype: Any = jnp.float32

    def __post_init__(self):
        for name, value, known in (("activation", self.activation, ACTIVATIONS),
                                   ("load_balance", self.load_balance, LOAD_BALANCE)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        for name, axes in (("num_experts", self.roles.expert), ("d_ff", self.roles.expert_shard),
                           ("d_model", self.roles.fsdp)):
            size, count = getattr(self, name), axes_size(self.mesh, axes)
            if size % count:
                raise ValueError(f"{name} must be divisible by {count}, the size of mesh axes {axes}; got {size}")
        if isinstance(self.router, Soft) and isinstance(self.dispatch, Ragged):
            raise ValueError("dispatch Ragged needs a router that sends whole tokens, got Soft; use Slots")
        self.router.weights(self.d_model, self.num_experts)   # raises for numbers that do not fit

    @property
    def expert_specs(self) -> ExpertWeights:
        """Shardings of the experts' weights; as gate_EDF has up_EDF's, it is there even where the weight is not."""
        stored = self.roles.expert_fsdp
        columns: Any = P(self.roles.expert, stored, self.roles.expert_shard)
        rows: Any = P(self.roles.expert, self.roles.expert_shard, stored)
        return ExpertWeights(columns, rows, columns if self.activation == "swiglu" else None)


class MoE(nnx.Module):
    """Mixture-of-Experts feed-forward layer: y_BSD, aux = moe(x_BSD).

    mesh: None runs the same code on one device. roles: mesh axes of each role (see `Roles`).
    router: see `jaxmoe.routing`; `ExpertChoice` and `Soft` leak future tokens in causal models.
    dispatch: `Slots` (capacity, drops what does not fit) or `Ragged` (drops nothing).
    shared_experts: experts that every token goes to, beside the routed ones.
    group: capacity groups, "sequence" (each sequence is one) or n contiguous pieces of the global batch.
    load_balance: which formula, "switch", "hf", "megatron" or "deepseek_seq".
    dtype: compute type of the experts; parameters are float32, and routing is at least float32.

    Example: ``moe = MoE(64, 128, 8, router=TopK(k=2), rngs=nnx.Rngs(0)); y, aux = moe(jnp.ones((2, 16, 64)))``
    """

    def __init__(
        self, d_model: int, d_ff: int, num_experts: int, *, rngs: nnx.Rngs, router: Router = TopK(),
        dispatch: Dispatch = Slots(), activation: str = "swiglu", shared_experts: int = 0, mesh: Mesh | None = None,
        roles: Roles | None = None, group: Group = "sequence", load_balance: str = "switch", dtype: Any = jnp.float32,
    ):
        roles = roles if mesh is not None and roles is not None else Roles()
        self.spec = spec = Spec(d_model, d_ff, num_experts, router, dispatch, activation, mesh, roles, group,
                                load_balance, jnp.dtype(dtype))
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
                           _value(self.bias), key)
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
    """Sum of experts that every token goes to."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1]).astype(spec.dtype)
    y_ETD = experts(jnp.broadcast_to(x_TD, (w.up_EDF.shape[0], *x_TD.shape)), w, spec.activation)
    y_BSD = y_ETD.sum(0).reshape(x_BSD.shape).astype(x_BSD.dtype)
    return y_BSD if token_mask is None else jnp.where(token_mask[..., None], y_BSD, 0)


def _value(param):
    return None if param is None else param[...]


def apply(
    spec: Spec, router: dict[str, jax.Array], w: ExpertWeights, x_BSD, token_mask=None, segment_ids=None,
    forced_experts=None, bias_E=None, key=None,
) -> tuple[jax.Array, Aux]:
    """The functional core. Pads batch and sequence to the mesh, and opens the one shard_map."""
    B, S = _check_inputs(spec, x_BSD, token_mask, segment_ids, forced_experts)
    roles, mesh = spec.roles, spec.mesh
    shards, sequence_shards = axes_size(mesh, roles.batch_axes), axes_size(mesh, roles.sequence_axes)
    extra = ((0, -B % shards), (0, -S % sequence_shards))
    groups = _groups(spec, B, B + extra[0][1], S, shards)
    mask_BS = jnp.ones((B, S), bool) if token_mask is None else token_mask.astype(bool)
    by_token = {
        "x": x_BSD, "mask": mask_BS, "index": jnp.arange(B * S).reshape(B, S),
        "segment": jnp.zeros((B, S), jnp.int32) if segment_ids is None else segment_ids, "forced": forced_experts,
    }
    by_token = {name: jnp.pad(a, (*extra, *((0, 0),) * (a.ndim - 2))) for name, a in by_token.items() if a is not None}
    body = partial(_local, spec, groups)
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


def _groups(spec: Spec, batch: int, padded: int, sequence: int, shards: int) -> Groups:
    axes = spec.roles.sequence_axes
    if spec.group == "sequence":
        return Groups(padded // shards, sequence, axes)
    if batch % spec.group or spec.group % shards:
        raise ValueError(f"moe.group must divide the batch {batch} and be a multiple of its {shards} shards, "
                         f"got {spec.group}")
    return Groups(spec.group // shards, batch // spec.group * sequence, axes, batch // spec.group)


def _local(spec: Spec, groups: Groups, router, bias_E, key, w: ExpertWeights, by_token) -> tuple[jax.Array, Aux]:
    """One device's part: route, then what the dispatch does, then statistics."""
    B, S, D = by_token["x"].shape
    tokens, bad_T = _tokens(by_token, groups)
    routing = spec.router(router, tokens, groups, bias_E, key)
    w = _gathered(w, spec.roles.expert_fsdp)
    y_TD, dropped = spec.dispatch(tokens.x_TD.astype(spec.dtype), routing, spec.router, groups, w, spec.activation,
                                  spec.roles)
    fair_load = spec.router.pairs_per_token(spec.num_experts) * groups.tokens / spec.num_experts
    aux = statistics(routing, tokens, groups, dropped, bad_T.sum(), spec.load_balance, spec.roles.token_axes, fair_load)
    y_TD = jnp.where(tokens.valid_T[:, None], y_TD, jnp.where(bad_T[:, None], jnp.nan, 0)).astype(by_token["x"].dtype)
    return y_TD.reshape(groups.local, S, groups.sequences, D).swapaxes(1, 2).reshape(B, S, D), aux


def _tokens(by_token: dict[str, jax.Array], groups: Groups) -> tuple[Tokens, jax.Array]:
    """Tokens group by group, by position and then sequence; and which are valid but not finite.

    A token that is not finite goes to no expert and into no statistic, and its output is NaN: it shows, alone.
    """
    (B, S), pieces = by_token["x"].shape[:2], {}
    for name, a in by_token.items():
        pieces[name] = a.reshape(groups.local, groups.sequences, S, -1).swapaxes(1, 2).reshape(B * S, *a.shape[2:])
    finite_T = jnp.isfinite(pieces["x"]).all(-1)
    valid_T = pieces["mask"] & finite_T
    x_TD = jnp.where(valid_T[:, None], pieces["x"], 0)
    tokens = Tokens(x_TD, valid_T, pieces["index"], pieces["segment"], pieces.get("forced"))
    return tokens, pieces["mask"] & ~finite_T


def _gathered(w: ExpertWeights, axes) -> ExpertWeights:
    """Expert weights whole over the axes that only store them."""
    gate_EDF = None if w.gate_EDF is None else all_gather(w.gate_EDF, axes, 1)
    return ExpertWeights(all_gather(w.up_EDF, axes, 1), all_gather(w.down_EFD, axes, 2), gate_EDF)
