"""What the tasks of a model's plans take on the present devices, each alone, with the values of a train step.

Tasks of a verb are timed at several degrees and fitted with a line (`cluster.Module`), so that plans of other degrees
can be simulated. FSMoE profiles modules so before it plans. (read; the fit by verb is ours)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..compat import vary_over
from ..mesh import make_mesh
from ..plan.block import Block
from ..plan.cluster import Cluster, Module
from ..plan.cost import amount, is_module, module_of
from ..plan.execute import watched
from ..plan.plan import Plan
from ..plan.schedules import SCHEDULES
from ..plan.simulate import simulate
from ..plan.tasks import Degrees, Task
from ..planning import coded
from ..training.step import compiled_step, init_state
from .profile import Fit, fit
from .timing import in_a_row, seconds_of
from .training import random_batch, steppers

DEGREES = (1, 2, 4)
HALVINGS = 30
NEWEST = 4   # of the executions of a task that a device is seen to run, in all layers and microbatches
Key = tuple[str, float]   # module, amount


def with_modules(cfg: Any, cluster: Cluster, repeats: int = 5,
                 degrees: Sequence[int] = DEGREES) -> tuple[Cluster, list[Fit]]:
    """The cluster with modules of cfg's model, measured on the present devices at these degrees, and their fits.

    Modules that the cluster has already are kept. The plans whose tasks are timed are made with its other costs. In a
    run of several processes all call this, and get what the first one measured.
    """
    mesh = make_mesh(cfg)
    times: dict[str, dict[float, list[float]]] = {}
    for plan in _plans(cfg, cluster, degrees):
        for (module, n), seconds in task_seconds(cfg, mesh, plan, repeats, frozenset(cluster.modules)).items():
            times.setdefault(module, {}).setdefault(n, []).append(seconds)
    fits = [fitted(module, {n: float(np.median(t)) for n, t in by_amount.items()})
            for module, by_amount in times.items()]
    modules = {f.what: Module(origin="measured", alpha_seconds=f.alpha_seconds, seconds_per_unit=f.seconds_per_unit)
               for f in fits}
    return cluster.model_copy(update={"modules": cluster.modules | modules}), fits


def with_launch(cfg: Any, cluster: Cluster, repeats: int = 5, degrees: Sequence[int] = DEGREES) -> Cluster:
    """The cluster with `device.launch_seconds` such that steps of cfg's model in the fewest and in the most of these
    chunks differ in simulation as they do on the present devices.

    It stands for what a task takes in a program beyond its own work: its values are cut and joined, it waits for its
    turn. All processes of a run call this. With one degree that the block can be cut at, the cluster is as it was.
    """
    plans = _plans(cfg, cluster, degrees)
    if len(plans) < 2:
        return cluster
    few, many = plans[0], plans[-1]
    mesh = make_mesh(cfg)
    seconds, _ = seconds_of(steppers(cfg, mesh, {"few": few, "many": many}), repeats)
    measured = seconds["many"] - seconds["few"]
    least, most = 0.0, max(measured, 0.0)   # many tasks pay it, so it is at most the whole difference
    for _ in range(HALVINGS):
        tried = _launching(cluster, (least + most) / 2)
        too_long = simulate(many, tried).makespan - simulate(few, tried).makespan > measured
        least, most = (least, (least + most) / 2) if too_long else ((least + most) / 2, most)
    return _launching(cluster, least)


def _launching(cluster: Cluster, seconds: float) -> Cluster:
    device = cluster.device.model_copy(update={"launch_seconds": seconds})
    return cluster.model_copy(update={"device": device})


def _plans(cfg: Any, cluster: Cluster, degrees: Sequence[int]) -> list[Plan]:
    """PipeMoE's in so many chunks, as far as the block can be cut so."""
    block = coded(cfg, cluster)
    return [SCHEDULES["pipemoe"](block, cluster, d, slices=d.moe_forward) for d in _fitting(block, degrees)]


def task_seconds(cfg: Any, mesh: Mesh, plan: Plan, repeats: int, known: frozenset[str] = frozenset()) -> dict[
        Key, float]:
    """Seconds of one task of each module and amount, less what a call that does nothing takes. known: modules to leave
    out."""
    model, optimizer = init_state(cfg, mesh, plan)
    batch = random_batch(cfg, mesh)
    recorder = _Recorder(mesh, known)
    with watched(recorder.see):
        jax.block_until_ready(compiled_step(cfg, model, optimizer)(batch))
    jax.effects_barrier()
    calls = recorder.calls()
    seconds, _ = seconds_of({"": _empty(mesh)} | {str(key): call for key, (call, _) in calls.items()}, repeats)
    return {key: max(seconds[str(key)] / count - seconds[""], 0.0) for key, (_, count) in calls.items()}


def _fitting(block: Block, degrees: Sequence[int]) -> list[Degrees]:
    """Those that the block can be cut at."""
    found = []
    for r in degrees:
        d = Degrees(r, r) if block.chunk == "slots" else Degrees(r, r, r, r)
        try:
            block.check_degrees(d)
        except ValueError:
            continue
        found.append(d)
    return found


def fitted(module: str, seconds: Mapping[float, float]) -> Fit:
    """Amount -> seconds as a line; through the origin if there is one amount, flat if larger ones take no longer."""
    amounts = sorted(seconds)
    times = [seconds[n] for n in amounts]
    if len(amounts) > 1 and min(times) > 0:
        try:
            return fit(module, amounts, times)
        except ValueError:
            return Fit(module, float(np.median(times)), 0.0, 0.0, tuple(amounts), tuple(times))
    return Fit(module, 0.0, times[-1] / amounts[-1], 1.0, tuple(amounts), tuple(times))


class _Recorder:
    """Keeps what one task of each module and amount last read on the devices of this process, but for known modules."""

    def __init__(self, mesh: Mesh, known: frozenset[str]):
        self.mesh, self.axes, self.known = mesh, tuple(mesh.axis_names), known
        self.tasks: dict[Key, tuple[Task, Callable, Any]] = {}
        self.kept: dict[Key, deque[tuple[jax.Array, list[jax.Array]]]] = {}

    def see(self, task: Task, run: Callable, reads: tuple, consts: Any) -> None:
        key = module_of(task), amount(task)
        if not is_module(task) or key[0] in self.known or (key in self.tasks and self.tasks[key][0].name != task.name):
            return
        leaves, tree = jax.tree.flatten((reads, consts))
        kinds = [jax.random.key_impl(a) if _is_key(a) else None for a in leaves]
        self.tasks[key] = task, run, (tree, kinds)   # a pass may be traced more than once
        data = [jax.random.key_data(a) if _is_key(a) else a for a in leaves]
        jax.debug.callback(partial(self._keep, key), jax.lax.axis_index(self.axes), data)

    def _keep(self, key: Key, device, leaves) -> None:
        # To read them here would wait for the program itself. Devices are at most a few layers apart
        newest = deque(maxlen=NEWEST * jax.local_device_count())
        self.kept.setdefault(key, newest).append((device, leaves))

    @property
    def keys(self) -> list[Key]:
        """In the same order in every process, as some tasks are collectives."""
        return [key for key in self.tasks if key in self.kept]

    def calls(self) -> dict[Key, tuple[Callable[[], Any], int]]:
        """What to call for each, and how often that does it."""
        return {key: in_a_row(self._call(key), key[1]) if self.tasks[key][0].is_collective else (self._call(key), 1)
                for key in self.keys}

    def _call(self, key: Key) -> Callable[[], Any]:
        """A program of the task alone, on what it read; all of it and of its results vary over all devices."""
        _, run, (tree, kinds) = self.tasks[key]
        spec = P(self.axes)

        def local(*blocks):
            leaves = [b[0] if kind is None else jax.random.wrap_key_data(b[0], impl=kind)
                      for b, kind in zip(blocks, kinds, strict=True)]
            reads, consts = tree.unflatten(leaves)
            return jax.tree.map(lambda a: a[None], vary_over(run(reads, consts), self.axes))

        held = {int(device): [np.asarray(a) for a in leaves] for device, leaves in self.kept[key]}
        arrays = [self._global({d: leaves[i] for d, leaves in held.items()}) for i in range(len(kinds))]
        mapped = jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=spec, out_specs=spec))
        return lambda: mapped(*arrays)

    def _global(self, by_device: dict[int, np.ndarray]) -> jax.Array:
        shape = (self.mesh.size, *next(iter(by_device.values())).shape)
        sharding = NamedSharding(self.mesh, P(self.axes))
        return jax.make_array_from_callback(shape, sharding, lambda at: by_device[_first(at)][None])


def _first(at: Any) -> int:
    """Where an index of slices begins in the first dim."""
    return at[0].start or 0


def _is_key(a: jax.Array) -> bool:
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def _empty(mesh: Mesh) -> Callable[[], Any]:
    spec = P(tuple(mesh.axis_names))
    zeros = jax.jit(partial(jnp.zeros, mesh.size), out_shardings=NamedSharding(mesh, spec))()
    mapped = jax.jit(jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec))
    return lambda: mapped(zeros)
