"""Time of the train step under several schedules, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..mesh import batch_sharding, make_mesh, roles_of
from ..plan.cluster import load_cluster
from ..plan.plan import Plan
from ..plan.simulate import simulate
from ..planning import plan
from ..training.step import compiled_step, init_state
from .timing import seconds_of


def random_batch(cfg: Any, mesh: Mesh) -> jax.Array:
    """Tokens of one step, the same in every process."""
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab, (cfg.train.batch, cfg.model.seq + 1), np.int32)
    return jax.make_array_from_callback(tokens.shape, batch_sharding(mesh, roles_of(cfg)), lambda at: tokens[at])


def steppers(cfg: Any, mesh: Mesh, plans: Mapping[str, Plan | None]) -> dict[str, Callable[[], jax.Array]]:
    """By name, calls that take one training step each, of one model and on one batch. None = without a plan."""
    model, optimizer = init_state(cfg, mesh, next((p for p in plans.values() if p is not None), None))
    batch, calls = random_batch(cfg, mesh), {}
    for name, made in plans.items():
        model.plan = made
        calls[name] = partial(_loss, compiled_step(cfg, model, optimizer), batch)
    return calls


def _loss(step: Callable[[jax.Array], dict[str, jax.Array]], batch: jax.Array) -> jax.Array:
    return step(batch)["loss"]


def fastest(cfg: Any, mesh: Mesh, plans: Sequence[Plan], repeats: int = 5) -> tuple[Plan, list[float]]:
    """The plan whose training steps take the least time on the present devices, and the median seconds of all.

    In a run of several processes all call this with the same plans, and get the same.
    """
    seconds, _ = seconds_of(steppers(cfg, mesh, {str(i): p for i, p in enumerate(plans)}), repeats)
    found = [seconds[str(i)] for i in range(len(plans))]
    return plans[found.index(min(found))], found


def bench_train(cfg: Any, schedules: Sequence[str] = ("plain", "sequential", "pipemoe"),
                repeats: int = 7) -> list[dict[str, Any]]:
    """One row a schedule, on the present devices and random tokens; the mesh must be theirs.

    Keys: schedule, step_seconds (median), spread, tokens_per_second, over_plain (step_seconds over those of "plain"),
    predicted_seconds of the stack's tasks on `schedule.cluster` (modelled; without embedding, head and optimizer).
    """
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"scan": True})})
    plans = {kind: None if kind == "plain" else plan(cfg.model_copy(
        update={"schedule": cfg.schedule.model_copy(update={"kind": kind, "plan": None})})) for kind in schedules}
    seconds, spread = seconds_of(steppers(cfg, make_mesh(cfg), plans), repeats)
    cluster = load_cluster(cfg.schedule.cluster)
    rows = []
    for kind, made in plans.items():
        row = {"schedule": kind, "step_seconds": seconds[kind], "spread": spread[kind],
               "tokens_per_second": cfg.train.batch * cfg.model.seq / seconds[kind]}
        if "plain" in seconds:
            row["over_plain"] = seconds[kind] / seconds["plain"]
        if made is not None:
            row["predicted_seconds"] = simulate(made, cluster).makespan
        rows.append(row)
    return rows
