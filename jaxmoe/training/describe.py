"""What a config makes: parameters, shardings, bytes per device and FLOPs, without allocating anything."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..mesh import abstract_mesh, roles_of
from ..models.abstract import abstract_parameters
from ..routing import ROUTERS

OPTIMIZER_COPIES = 2   # AdamW's two moments, stored as the parameters are
TRAINING_OVER_FORWARD = 3   # the backward pass costs two forward passes


def is_routed(name: str) -> bool:
    """True for the weights of experts, of which a token uses only some."""
    return name.endswith(("_EDF", "_EFD")) and ".shared" not in name


def flops_per_token(cfg: Any, parameters: dict[str, float]) -> float:
    """Forward multiply-adds times 2: parameters that multiply a token, and causal attention at full sequence length."""
    m = cfg.model
    matrices = sum(count for name, count in parameters.items() if name != "embedding")
    head = m.vocab * m.d_model if m.tied else 0
    attention = m.layers * m.seq * m.d_model   # scores and values, of which the causal half is needed
    return 2 * (matrices + head + attention)


def describe(cfg: Any) -> dict[str, Any]:
    """Keys: parameters (rows of name, shape, sharding, bytes_per_device), total_parameters, active_parameters,
    parameter_bytes_per_device, optimizer_bytes_per_device, forward_flops_per_token, train_flops_per_token, mesh,
    unused_axes."""
    mesh = abstract_mesh(cfg)
    router = ROUTERS[cfg.moe.router.kind](**cfg.moe.router.model_dump(exclude={"kind"}))
    used = router.pairs_per_token(cfg.moe.num_experts) / cfg.moe.num_experts
    rows, active = [], {}
    for name, (leaf, spec) in abstract_parameters(cfg, mesh).items():
        shard = NamedSharding(mesh, spec).shard_shape(leaf.shape)
        active[name] = math.prod(leaf.shape) * (used if is_routed(name) else 1)
        rows.append({"name": name, "shape": list(leaf.shape), "sharding": _text(spec, len(leaf.shape)),
                     "bytes_per_device": math.prod(shard) * leaf.dtype.itemsize})
    stored = sum(row["bytes_per_device"] for row in rows)
    forward = flops_per_token(cfg, active)
    roles = dataclasses.astuple(roles_of(cfg))
    return {
        "mesh": dict(mesh.shape), "unused_axes": [a for a in mesh.shape if not any(a in axes for axes in roles)],
        "parameters": rows, "total_parameters": sum(math.prod(row["shape"]) for row in rows),
        "active_parameters": round(sum(active.values())), "parameter_bytes_per_device": stored,
        "optimizer_bytes_per_device": OPTIMIZER_COPIES * stored, "forward_flops_per_token": forward,
        "train_flops_per_token": TRAINING_OVER_FORWARD * forward,
    }


def _text(spec: P, dims: int) -> str:
    """One entry a dim: "-" where it is whole, else mesh axes joined by "+"."""
    entries = [(e,) if isinstance(e, str) else tuple(e or ()) for e in spec] + [()] * (dims - len(spec))
    return "(" + ", ".join("+".join(e) or "-" for e in entries) + ")"


def as_text(found: dict[str, Any]) -> str:
    """The table that `jaxmoe describe` prints."""
    head = ("parameter", "shape", "sharding", "bytes/device")
    table = [(r["name"], "x".join(map(str, r["shape"])) or "scalar", r["sharding"], f"{r['bytes_per_device']:,}")
             for r in found["parameters"]]
    wide = [max(len(row[i]) for row in (head, *table)) for i in range(4)]
    lines = ["  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, wide, strict=True)))
             for row in (head, *table)]
    lines += [
        f"mesh: {', '.join(f'{a} = {n}' for a, n in found['mesh'].items())}",
        f"parameters: {found['total_parameters']:,}; active per token: {found['active_parameters']:,}",
        f"bytes per device: {found['parameter_bytes_per_device']:,} parameters, "
        f"{found['optimizer_bytes_per_device']:,} optimizer",
        f"FLOPs per token: {found['forward_flops_per_token']:,.0f} forward, "
        f"{found['train_flops_per_token']:,.0f} training",
    ]
    lines += [f"mesh axis {a} has no role: its devices all do the same work" for a in found["unused_axes"]]
    return "\n".join(lines)
