"""The plan of a run as measurements on its devices choose it: of its tasks, and of whole steps of its candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from ..plan.cluster import Cluster, load_cluster
from ..plan.plan import Plan
from ..planning import candidates, plan
from .modules import with_launch, with_modules
from .training import fastest


@dataclass(frozen=True)
class MeasuredPlan:
    """cluster: what was planned with. seconds: of a training step, measured, by candidate, the one first that was
    expected to be the fastest; empty if there was one only."""

    plan: Plan
    cluster: Cluster
    seconds: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """For people: what was measured, and what came of it."""
        d, block = self.plan.degrees, self.plan.block
        chosen = f"a plan cut along the {block.chunk}, {d.moe_forward} chunks forward and {d.moe_backward} backward"
        if not self.seconds:
            return chosen
        measured = ", ".join(f"{s:.3f}" for s in self.seconds)
        return f"{chosen}: the fastest of {len(self.seconds)}, whose steps took {measured} s"


def wants_measurements(cfg: Any) -> bool:
    """Whether cfg wants its plan chosen by measurements."""
    return cfg.schedule.is_planned and (cfg.schedule.profile or cfg.schedule.candidates > 1)


def choose(cfg: Any, mesh: Mesh) -> MeasuredPlan:
    """As `schedule.profile` and `schedule.candidates` say. All processes of a run call this, and get the same."""
    cluster = load_cluster(cfg.schedule.cluster)
    if cfg.schedule.profile:
        cluster, _ = with_modules(cfg, cluster)
        cluster = with_launch(cfg, cluster)
    made = candidates(cfg, cluster) if cfg.schedule.candidates > 1 else [plan(cfg, cluster)]
    if len(made) == 1:
        return MeasuredPlan(made[0], cluster)
    chosen, seconds = fastest(cfg, mesh, made)
    return MeasuredPlan(chosen, cluster, tuple(seconds))
