"""What is known of a layer before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .dispatch import Dispatch, Ragged, Slots
from .experts import ACTIVATIONS, ExpertWeights
from .mesh import Roles, axes_size
from .routing import Router, Soft, TopK
from .routing.losses import LOAD_BALANCE
from .types import Groups

Group = Literal["sequence"] | int


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
    def in_turn(self) -> bool:
        """Whether collectives must wait for loops that hold some: see `jaxmoe.collectives.turns`."""
        return self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"

    @property
    def expert_specs(self) -> ExpertWeights:
        """Shardings of the experts' weights; as gate_EDF has up_EDF's, it is there even where the weight is not."""
        stored = self.roles.expert_fsdp
        columns: Any = P(self.roles.expert, stored, self.roles.expert_shard)
        rows: Any = P(self.roles.expert, self.roles.expert_shard, stored)
        return ExpertWeights(columns, rows, columns if self.activation == "swiglu" else None)

    def groups(self, batch: int, sequence: int) -> Groups:
        """Capacity groups of a global batch, which is padded to a multiple of its shards."""
        axes, shards = self.roles.sequence_axes, axes_size(self.mesh, self.roles.batch_axes)
        if self.group == "sequence":
            return Groups(-(-batch // shards), sequence, axes)
        if batch % self.group or self.group % shards:
            raise ValueError(f"moe.group must divide the batch {batch} and be a multiple of its {shards} shards, "
                             f"got {self.group}")
        return Groups(self.group // shards, batch // self.group * sequence, axes, batch // self.group)
