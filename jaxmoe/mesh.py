"""Device mesh and roles: which mesh axes a tensor is split over, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .types import Axes


@dataclass(frozen=True)
class Roles:
    """Mesh axes of each role; () switches a role off. See `[parallel]` in the README.

    Example: ``roles = Roles(data=("node", "gpu"), expert=("gpu",))``
    """

    data: Axes = ()
    expert: Axes = ()
    expert_shard: Axes = ()
    model: Axes = ()
    fsdp: Axes = ()

    @property
    def sequence_axes(self) -> Axes:
        """Axes that the sequence dim of activations is split over."""
        return self.model

    @property
    def batch_axes(self) -> Axes:
        """Axes that the batch dim is split over: every axis of a role but `model`, so that no work is done twice."""
        axes = dict.fromkeys((*self.data, *self.fsdp, *self.expert, *self.expert_shard))
        return tuple(a for a in axes if a not in self.model)

    @property
    def token_axes(self) -> Axes:
        return (*self.batch_axes, *self.sequence_axes)

    @property
    def expert_fsdp(self) -> Axes:
        """Axes that expert parameters are stored over, besides `expert` and `expert_shard`."""
        return tuple(a for a in self.fsdp if a not in (*self.expert, *self.expert_shard))


def axes_size(mesh: Mesh | None, axes: Axes) -> int:
    return math.prod(mesh.shape[a] for a in axes) if mesh is not None else 1


def roles_of(cfg) -> Roles:
    """The roles that `[parallel]` describes. Raises ValueError if they are still to be chosen."""
    p = cfg.parallel
    if p.kind != "given":
        raise ValueError(f'parallel.kind must be "given" by now, got "{p.kind}": use jaxmoe.choose_roles(cfg)')
    return Roles(tuple(p.data), tuple(p.expert), tuple(p.expert_shard), tuple(p.model), tuple(p.fsdp))


def axis_sizes(axes: Mapping[str, int], count: int) -> dict[str, int]:
    """`[mesh] axes` with -1 replaced by what is left of so many devices, 1 at least."""
    known = math.prod(s for s in axes.values() if s != -1)
    return {name: max(count // known, 1) if s == -1 else s for name, s in axes.items()}


def make_mesh(cfg) -> Mesh:
    """The mesh of `[mesh] axes` over all present devices; one size may be -1.

    Raises ValueError if the product of the sizes is not the number of devices.

    Example: ``mesh = make_mesh(load_config("configs/quickstart.toml"))``
    """
    count = jax.device_count()
    sizes = axis_sizes(cfg.mesh.axes, count)
    if math.prod(sizes.values()) != count:
        raise ValueError(
            f"mesh.axes: the product of {sizes} must be the device count {count}, got {math.prod(sizes.values())}; "
            "change mesh.axes (one size may be -1)"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(cfg) -> AbstractMesh:
    """The config's mesh without devices; a size -1 is what the present devices leave."""
    sizes = axis_sizes(cfg.mesh.axes, jax.device_count())
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def batch_sharding(mesh: Mesh, roles: Roles) -> NamedSharding:
    """Sharding of an input batch [B, S]: split over the batch axes. The model splits the sequence itself."""
    return NamedSharding(mesh, P(roles.batch_axes))
