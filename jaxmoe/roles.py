"""Which mesh axes take which role, where `[parallel] kind = "auto"` leaves that to the planner (ours).

Every legal mapping that keeps the given roles and group sizes, and that the model and the batch divide into, is planned
with the config's schedule: those of the lowest bounds first, until no bound is below the fastest plan. What is compared
is the modelled time of the stack of blocks; embedding, head and optimizer take no part in it. Mappings whose plans need
more memory than a device has are not chosen.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .config import ROLES, Config, ConfigError, from_dict
from .mesh import abstract_mesh, roles_of
from .plan.cluster import Cluster, as_cluster
from .plan.schedules.base import Trials
from .plan.search import does_not_fit, variants
from .plan.simulate import simulate
from .planning import KEPT, coded, memory_of, plan, ways_to_code

# What one axis may be; an axis that is not of `model` splits the batch.
DENSE = (("data",), ("data", "fsdp"), ("model",))
MOE = ((), ("expert",), ("expert_shard",))


class RoleMapping(NamedTuple):
    """cfg: with the roles filled in. seconds: modelled, of its plan's stack."""

    cfg: Config
    seconds: float

    @property
    def text(self) -> str:
        """For people."""
        roles = roles_of(self.cfg)
        return ", ".join(f"{role} over {' and '.join(axes)}" for role in ROLES if (axes := getattr(roles, role)))


def choose_roles(cfg: Config, cluster: Cluster | str | Path | None = None) -> Config:
    """cfg with roles for every mesh axis; as it is, if it gives them itself.

    cluster: costs to plan with; None = `schedule.cluster`. Raises ConfigError if no mapping is legal or fits.

    Example: ``cfg = jaxmoe.choose_roles(jaxmoe.load_config("configs/quickstart.toml", ["parallel.kind=auto",
    "parallel.expert=[]", "schedule.kind=pipemoe", "schedule.cluster=cpu-8", "model.scan=true"]))``
    """
    return cfg if cfg.parallel.kind == "given" else mappings(cfg, cluster)[0].cfg


def mappings(cfg: Config, cluster: Cluster | str | Path | None = None) -> list[RoleMapping]:
    """All mappings that were planned and fit, the fastest first. See `choose_roles`."""
    costs, why = as_cluster(cfg.schedule.cluster if cluster is None else cluster), ""
    bounds: list[tuple[float, Config]] = []
    for mapped in legal(cfg):
        try:
            bounds.append((_bound(mapped, costs), mapped))
        except ValueError as e:   # its block cannot be as `[schedule]` asks for
            why = why or f"; the first: {e}"
    if not bounds:
        raise ConfigError('parallel.kind="auto" must find roles that keep what [parallel] gives and divide the model '
                          f"and train.batch={cfg.train.batch}, got none for mesh.axes {cfg.mesh.axes}; drop "
                          f"parallel.sizes or roles, or change mesh.axes{why}")
    found, why = [], ""
    for bound, mapped in sorted(bounds, key=lambda b: b[0]):
        if found and bound >= min(m.seconds for m in found):
            break
        try:
            found.append(RoleMapping(mapped, _seconds(mapped, costs)))
        except ValueError as e:   # cannot be cut by this schedule, or does not fit
            why = why or str(e)
    if not found:
        raise ConfigError(f'parallel.kind="auto": none of {len(bounds)} mappings of roles can be planned; the one of '
                          f"the lowest bound: {why}")
    return sorted(found, key=lambda m: m.seconds)


def legal(cfg: Config) -> Iterator[Config]:
    """cfg with every mapping of roles that keeps what `[parallel]` gives and that sizes divide into."""
    mesh = abstract_mesh(cfg)
    given = {role: axes for role in ROLES if (axes := getattr(cfg.parallel, role))}
    for options in itertools.product(itertools.product(DENSE, MOE), repeat=len(mesh.shape)):
        roles = {role: tuple(axis for axis, (dense, moe) in zip(mesh.shape, options, strict=True)
                             if role in (*dense, *moe)) for role in ROLES}
        size = {role: math.prod(mesh.shape[a] for a in axes) for role, axes in roles.items()}
        if any(set(roles[r]) != set(axes) for r, axes in given.items()) or any(
                size[r] != n for r, n in cfg.parallel.sizes.items()):
            continue
        shards = math.prod(mesh.shape.values()) // size["model"]
        if cfg.train.batch % (shards * cfg.train.accumulate) or cfg.model.seq % size["model"]:
            continue
        try:
            yield _with_roles(cfg, roles | given)
        except ConfigError:
            continue


def _with_roles(cfg: Config, roles: dict[str, tuple[str, ...]]) -> Config:
    with warnings.catch_warnings():   # the config has warned already
        warnings.simplefilter("ignore")
        return from_dict(cfg.model_dump() | {"parallel": roles})


def _bound(cfg: Config, cluster: Cluster) -> float:
    """Seconds that no plan of the stack goes below."""
    blocks = ways_to_code(cfg, cluster) if cfg.schedule.kind == "auto" else [coded(cfg, cluster)]
    cuts = [cuts[0] for block in blocks for cuts in variants(block)]
    least = min(Trials(cut, cluster, KEPT[cfg.train.remat]).least() / cut.segment for cut in cuts)
    return least * cfg.model.layers


def _seconds(cfg: Any, cluster: Cluster) -> float:
    made = plan(cfg, cluster)
    memory, limit = memory_of(cfg, made), cluster.device.memory_bytes
    if memory.total > limit:
        raise ValueError(does_not_fit(memory, limit, cluster))
    return simulate(made, cluster).makespan
