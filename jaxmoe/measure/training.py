"""Time of the train step under several schedules, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..mesh import batch_sharding, make_mesh, roles_of
from ..plan.cluster import load_cluster
from ..plan.plan import Plan
from ..plan.simulate import simulate
from ..training.step import compiled_step, init_state
from .timing import seconds_of


def random_batch(cfg: Any, mesh: Mesh) -> jax.Array:
    """Tokens of one step, the same in every process."""
    tokens = np.random.default_rng(0).integers(0, cfg.model.vocab, (cfg.train.batch, cfg.model.seq + 1), np.int32)
    return jax.make_array_from_callback(tokens.shape, batch_sharding(mesh, roles_of(cfg)), lambda at: tokens[at])


def stepper(cfg: Any, mesh: Mesh, plan: Plan | None = None) -> Callable[[], Any]:
    """A call that takes one training step, on the same batch each time. plan: None = that of cfg."""
    model, optimizer = init_state(cfg, mesh, plan)
    step = compiled_step(cfg, model, optimizer)
    batch = random_batch(cfg, mesh)
    return lambda: step(batch)["loss"]


def bench_train(cfg: Any, schedules: Sequence[str] = ("plain", "sequential", "pipemoe"),
                repeats: int = 7) -> list[dict[str, Any]]:
    """One row a schedule, on the present devices and random tokens; the mesh must be theirs.

    Keys: schedule, step_seconds (median), spread, tokens_per_second, over_plain (step_seconds over those of "plain"),
    predicted_seconds of the stack's tasks on `schedule.cluster` (modelled; without embedding, head and optimizer).
    """
    mesh = make_mesh(cfg)
    batch = random_batch(cfg, mesh)
    calls, plans = {}, {}
    for kind in schedules:
        this = cfg.model_copy(update={"schedule": cfg.schedule.model_copy(update={"kind": kind}),
                                      "model": cfg.model.model_copy(update={"scan": True})})
        model, optimizer = init_state(this, mesh)
        step = compiled_step(this, model, optimizer)
        plans[kind] = getattr(model, "plan", None)
        calls[kind] = lambda step=step: step(batch)
    seconds, spread = seconds_of(calls, repeats)
    cluster = load_cluster(cfg.schedule.cluster)
    rows = []
    for kind in schedules:
        row = {"schedule": kind, "step_seconds": seconds[kind], "spread": spread[kind],
               "tokens_per_second": cfg.train.batch * cfg.model.seq / seconds[kind]}
        if "plain" in seconds:
            row["over_plain"] = seconds[kind] / seconds["plain"]
        if plans[kind] is not None:
            row["predicted_seconds"] = simulate(plans[kind], cluster).makespan
        rows.append(row)
    return rows
