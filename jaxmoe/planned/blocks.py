"""From layers and their shapes to what plans are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..dispatch import Slots
from ..mesh import axes_size
from ..plan.block import Block, Param
from ..routing import Soft
from ..spec import Spec

LINKS = {"node": "inter", "gpu": "intra"}


def links_of(axes, links: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Link of each mesh axis: as given, by the usual names, or "inter"."""
    known = LINKS | dict(links or {})
    return tuple((a, known.get(a, "inter")) for a in axes)


def moe_block(
    spec: Spec, batch: int, sequence: int, *, chunk: str = "slots", shared_experts: int = 0,
    links: Mapping[str, str] | None = None, specs: Mapping[str, P] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None, hierarchical: bool = False,
) -> Block:
    """The block of one MoE layer of a global batch [batch, sequence].

    specs, shapes: of parameters by name, as `parameters_of` names them; None = of a layer without attention.
    """
    if isinstance(spec.router, Soft):
        raise ValueError('a planned schedule needs a router that sends whole tokens, got Soft; use schedule "plain"')
    roles, mesh = spec.roles, spec.mesh
    B = -(-batch // axes_size(mesh, roles.batch_axes))
    S = -(-sequence // axes_size(mesh, roles.sequence_axes))
    shapes = shapes or {n: w.shape for n, w in _moe_shapes(spec, shared_experts).items()}
    specs = specs or _moe_specs(spec, shared_experts)
    axes = tuple((a, mesh.shape[a]) for a in roles.token_axes) if mesh is not None else ()
    named_roles = tuple((r, getattr(roles, r)) for r in ("data", "expert", "expert_shard", "model", "fsdp"))
    rows, group_rows = _rows(spec, batch, sequence, B * S)
    block = Block(
        batch=B, seq=S, d_model=spec.d_model, d_ff=spec.d_ff, num_experts=spec.num_experts,
        k=max(1, round(spec.router.pairs_per_token(spec.num_experts))), rows=rows, group_rows=group_rows,
        layout="slots" if isinstance(spec.dispatch, Slots) else "ragged", chunk=chunk,  # type: ignore[arg-type]
        groups=spec.groups(batch, sequence).local, by_token=_by_token(spec, batch, sequence),
        gated=spec.activation == "swiglu", shared_experts=shared_experts,
        hierarchical=hierarchical,
        bytes_per_value=jnp.dtype(spec.dtype).itemsize, axes=axes, links=links_of((a for a, _ in axes), links),
        roles=named_roles,
    )
    return replace(block, params=tuple(_param(block, n, shapes[n], specs.get(n, P())) for n in shapes))


def attention_block(block: Block, layers: int, segment: int, heads: int, kv_heads: int, head_dim: int) -> Block:
    """The same with attention before each MoE layer."""
    return replace(block, attention=True, layers=layers, segment=segment, heads=heads, kv_heads=kv_heads,
                   head_dim=head_dim)


def _rows(spec: Spec, batch: int, sequence: int, tokens: int) -> tuple[int, int]:
    """A block's rows and group_rows."""
    groups = spec.groups(batch, sequence)
    if not isinstance(spec.dispatch, Slots):
        devices = axes_size(spec.mesh, spec.roles.expert)
        return spec.dispatch.bucket_rows(tokens, spec.router, spec.num_experts, devices), 0
    capacity = spec.dispatch.capacity(spec.router, groups.tokens, spec.num_experts)
    return groups.local * min(capacity, tokens // groups.local), groups.local * min(capacity, groups.tokens)


def _by_token(spec: Spec, batch: int, sequence: int) -> bool:
    tokens = spec.groups(batch, sequence).tokens
    most = spec.router.most_per_expert(tokens, spec.num_experts)
    kept = spec.dispatch.capacity(spec.router, tokens, spec.num_experts) if isinstance(spec.dispatch, Slots) else most
    return most == tokens and kept >= most


def _moe_shapes(spec: Spec, shared: int) -> dict[str, Any]:
    D, F, E = spec.d_model, spec.d_ff, spec.num_experts
    weights: dict[str, Any] = {f"router_{n}": w for n, w in spec.router.weights(D, E).items()}
    shape = lambda *s: type("Shape", (), {"shape": s})  # noqa: E731
    weights |= {"w_up_EDF": shape(E, D, F), "w_down_EFD": shape(E, F, D)}
    gated = spec.activation == "swiglu"
    if gated:
        weights["w_gate_EDF"] = shape(E, D, F)
    if shared:
        weights |= {"shared_w_up_EDF": shape(shared, D, F), "shared_w_down_EFD": shape(shared, F, D)}
        if gated:
            weights["shared_w_gate_EDF"] = shape(shared, D, F)
    return weights


def _moe_specs(spec: Spec, shared: int) -> dict[str, P]:
    e, stored = spec.expert_specs, spec.roles.fsdp
    specs = {"w_up_EDF": e.up_EDF, "w_down_EFD": e.down_EFD, "w_gate_EDF": e.gate_EDF}
    specs |= {"shared_w_up_EDF": P(None, stored), "shared_w_gate_EDF": P(None, stored),
              "shared_w_down_EFD": P(None, None, stored)}
    return {n: s for n, s in specs.items() if s is not None}  # type: ignore[misc]


GROUPS = {"attention_norm": "attention", "w_q": "attention", "w_k": "attention", "w_v": "attention", "w_o": "attention",
          "q_norm": "attention", "k_norm": "attention", "ffn_norm": "router"}


# Roles that split a group's arrays at work; axes of `fsdp` that are not among them only store.
WORKING = {"attention": ("model",), "experts": ("expert", "expert_shard")}


def group_of(name: str) -> str:
    if name in GROUPS:
        return GROUPS[name]
    return "router" if name.startswith("router_") else "shared" if name.startswith("shared_") else "experts"


def _param(block: Block, name: str, shape: tuple[int, ...], spec: P) -> Param:
    """shape: global. Axes of `fsdp` only store; all other axes in the spec split the work, too."""
    roles = dict(block.roles)
    names = [() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec]
    names += [()] * (len(shape) - len(names))
    working = {a for role in WORKING.get(group_of(name), ()) for a in roles[role]}
    gather, gather_dim, local = (), 0, []
    for dim, (size, axes) in enumerate(zip(shape, names, strict=True)):
        stored = tuple(a for a in axes if a in roles["fsdp"] and a not in working)
        split = tuple(a for a in axes if a not in stored)
        if stored:
            gather, gather_dim = stored, dim
        local.append(size // block.size(split))
    held = {a for axes in names for a in axes}
    reduce = tuple(a for a, _ in block.axes if a not in held)
    return Param(name, group_of(name), tuple(local), gather, gather_dim, reduce)
