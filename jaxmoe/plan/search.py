"""The planner behind "auto": the fastest plan in simulation of all that the schedules can be combined to (ours).

What chunks are cut along, layers planned together, degrees, the order of each pass and slices of gradients are chosen
together, with the cluster's contention in the model. A cut goes no further if its bound, or its list order without
contention, is above what is found already; of the rest, the best orders are simulated with contention. Every schedule's
own plan competes, so that none is faster in simulation. Plans that need more memory than a device has are not chosen.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..config import ConfigError
from .block import CHUNKS, SAVED, SPLITS, Block, less_saved
from .cluster import AlphaBeta, Cluster, Link
from .cost import durations
from .graph import task_graph
from .memory import Memory, estimate
from .orders import Order, list_order
from .plan import Plan
from .schedules import SCHEDULES, mast, sp_moe
from .schedules.base import SLICES, Bench, Choice, Orders, Trials, all_degrees
from .simulate import Slowdown, Timeline, simulate, slowdown
from .tasks import STREAMS, Degrees

FORWARD: tuple[Order, ...] = (*mast.FORWARD, *sp_moe.FORWARD)
BACKWARD: tuple[Order, ...] = (*mast.BACKWARD, *sp_moe.BACKWARD)
PROBES = Orders(list_order, list_order)
SEGMENTS = (1, 2)
PROBED = 2       # choices, the best in list order, for which all orders are tried
PROMISING = 1.1  # a choice is tried only if its seconds in list order are below this times the best known
FINISHED = 2     # combinations whose orders are improved
FASTER = 2.0     # speed-up that `explain` assumes of one thing at a time


class Candidate(NamedTuple):
    """A plan, what it is expected to take, and an estimate of its memory."""

    plan: Plan
    timeline: Timeline
    memory: Memory

    @property
    def seconds(self) -> float:
        """Modelled, of the stack."""
        return self.timeline.makespan


@dataclass(frozen=True)
class Found:
    """candidates: the plans that fit in memory, the fastest of each way to cut the block and of each degrees, sorted by
    modelled seconds. alone: schedule -> modelled seconds of the stack under the schedule's own plan."""

    candidates: tuple[Candidate, ...]
    alone: Mapping[str, float]

    @property
    def plan(self) -> Plan:
        return self.candidates[0].plan

    @property
    def timeline(self) -> Timeline:
        return self.candidates[0].timeline

    @property
    def memory(self) -> Memory:
        return self.candidates[0].memory

    @property
    def seconds(self) -> dict[str, float]:
        """By schedule; "auto" is the plan's."""
        return {**self.alone, "auto": self.candidates[0].seconds}

    def unlike(self, most: int) -> list[Plan]:
        """Up to so many plans to be measured: the fastest, then that of each other kind of chunks, then the rest.

        Plans of one kind share the model's errors, so that measuring only those would not show them.
        """
        chunks = [c.plan.block.chunk for c in self.candidates]
        ranked = sorted(range(len(chunks)), key=lambda i: chunks[i] in chunks[:i])
        return [self.candidates[i].plan for i in ranked[:most]]


@dataclass(frozen=True)
class Combination:
    """A choice for a block (that of trials)."""

    trials: Trials
    choice: Choice

    @property
    def layer_seconds(self) -> float:
        """Modelled, of one layer in the middle of a stack, forward and backward, before overlaps are tied."""
        return self.trials.seconds(self.choice) / self.trials.block.segment

    @property
    def seconds(self) -> float:
        """About how long the stack takes: all segments and the last one's reductions, one after the other."""
        tail = self.trials.graph(self.choice).tail
        return self.layer_seconds * self.trials.block.layers + math.fsum(durations(tail, self.trials.cluster).values())

    @property
    def gap(self) -> float:
        """Share of its tasks' bound that the layer takes longer."""
        return self.trials.seconds(self.choice) / self.trials.bound(self.choice) - 1

    def under(self, contention: Slowdown | None) -> Combination:
        """The same choice, simulated so."""
        return replace(self, trials=self.trials.under(contention))

    def refined(self) -> Combination:
        """With improved orders."""
        return replace(self, choice=self.trials.refined(self.choice))

    def plan(self) -> Plan:
        forward, backward = self.choice.orders.forward, self.choice.orders.backward
        return self.trials.plan("auto", self.trials.sure(self.choice, (forward, *FORWARD), (backward, *BACKWARD)))


@dataclass(frozen=True)
class Space:
    """What the planner may choose from. degrees: None = all. limit: bytes of memory of a device. outside: how many
    parameters a device stores outside of the stack."""

    degrees: Degrees | None = None
    slices: tuple[int, ...] = SLICES
    limit: float = math.inf
    outside: float = 0.0


def plan(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
         saved: tuple[str, ...] = SAVED) -> Plan:
    """degrees, slices: None = the fastest in simulation."""
    return search(block, cluster, degrees, slices, saved).plan


def search(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
           saved: tuple[str, ...] = SAVED, outside: float = 0.0, memory_bytes: float | None = None) -> Found:
    """The fastest plan that fits the cluster's devices, and how long each schedule's own takes.

    saved: what is kept for the backward pass, or less where that does not fit. outside: parameters that a device stores
    outside of the stack. memory_bytes: of a device; None = as in the cluster's file. Raises ValueError if the block can
    be cut like none, or if no plan fits.
    """
    limit = cluster.device.memory_bytes if memory_bytes is None else memory_bytes
    space = Space(degrees, (slices,) if slices else SLICES, limit, outside)
    found: list[Candidate] = []
    alone: dict[str, float] = {}
    for kept in _worth_trying(block, [saved, *less_saved(saved)], space):
        own, made = _plans(block, Bench(cluster, kept), space)
        alone = alone or {name: c.seconds for name, c in own.items()}
        found += [*own.values(), *made]
        fastest = min([*own.values(), *made], key=lambda c: c.seconds)
        if fastest.memory.total <= limit:   # who saves less has more to do
            break
    fitting = [c for c in found if c.memory.total <= limit]
    if not fitting:
        raise ValueError(does_not_fit(min((c.memory for c in found), key=lambda m: m.total), limit, cluster))
    return Found(_best_of_each(fitting), alone)


def fastest_way(found: Iterable[Found]) -> Found:
    """Of blocks that differ in how tensors are coded: all plans, and of each schedule its fastest."""
    found = tuple(found)
    alone = {name: min(f.alone.get(name, math.inf) for f in found) for f in found for name in f.alone}
    return Found(_best_of_each(c for f in found for c in f.candidates), alone)


def _best_of_each(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    best: dict[tuple, Candidate] = {}
    for c in sorted(candidates, key=lambda c: c.seconds):
        b = c.plan.block
        cut = b.chunk, b.segment, b.exchanges, b.sharers, b.hierarchical, b.codec, c.plan.degrees
        best.setdefault(cut, c._replace(plan=replace(c.plan, schedule="auto")))
    return tuple(best.values())


def _worth_trying(block: Block, sets: list[tuple[str, ...]], space: Space) -> list[tuple[str, ...]]:
    """Sets of families to save that fit if nothing else takes room; the last one in any case."""
    def lasting(kept: tuple[str, ...]) -> float:
        graph = task_graph(replace(block, chunk="slots"), Degrees(), kept, 1)
        names = [tuple(p.by_name) for p in (graph.forward, graph.backward)]
        memory = estimate(block, graph, names[0], names[1], space.outside)
        return memory.total - memory.working

    return [kept for kept in sets if kept == sets[-1] or lasting(kept) <= space.limit]


def _plans(block: Block, bench: Bench, space: Space) -> tuple[dict[str, Candidate], list[Candidate]]:
    """Every schedule's own plan, by its name, and the best combinations of those that fit."""
    def candidate(made: Plan) -> Candidate:
        return Candidate(made, simulate(made, bench.cluster), plan_memory(made, space.outside))

    own = {name: candidate(SCHEDULES[name].plan(c.trials, c.choice))
           for name, c in singles(block, bench, space).items()}
    known = min((c.seconds for c in own.values() if c.memory.total <= space.limit), default=math.inf) / block.layers
    best = finished(block, bench, slowdown(bench.cluster), space, known)
    return own, [candidate(c.plan()) for c in best]


def singles(block: Block, bench: Bench, space: Space = Space()) -> dict[str, Combination]:
    """What each schedule chooses by itself, for those that the block can be cut for. Raises ValueError if that is none.
    """
    found, refused, slices = {}, [], space.slices[0] if len(space.slices) == 1 else None
    for name, schedule in SCHEDULES.items():
        try:
            trials = bench.trials(schedule.cut(block))
            choice = schedule.choose(trials, space.degrees, slices)
            trials.graph(choice)
            found[name] = Combination(trials, choice)
        except ValueError as e:   # not for this block, or not with the cluster's costs
            refused.append(e)
    if not found:
        raise refused[0]
    return found


def finished(block: Block, bench: Bench, contention: Slowdown | None, space: Space, known: float) -> list[Combination]:
    """The best combinations with improved orders, found with contention and (as all is heuristic) without."""
    return [c.refined().under(contention) for planned in dict.fromkeys((contention, None))
            for c in combinations(block, bench, planned, space, known)[:FINISHED]]


def combinations(block: Block, bench: Bench, contention: Slowdown | None, space: Space = Space(),
                 known: float = math.inf) -> list[Combination]:
    """Of each way to cut the block the fastest choice, fastest first; none that takes longer than `known` a layer."""
    found: list[Combination] = []
    for cuts in variants(block):
        given = [space.degrees] if space.degrees else all_degrees(cuts[0])
        for cut in cuts:   # longer segments take the degrees of shorter ones
            best = None
            with contextlib.suppress(ConfigError):   # the cluster's file lacks a collective that only this way needs
                best = combined(bench.trials(cut, contention), given, space, known * cut.segment)
            if best is not None:
                found.append(best)
                known, given = min(known, best.layer_seconds), [best.choice.degrees]
    return sorted(found, key=lambda c: c.seconds)


def variants(block: Block) -> Iterator[list[Block]]:
    """For each way to cut chunks and to exchange rows, the block at its segment, or at `SEGMENTS` if that is 1."""
    segments = [s for s in SEGMENTS if block.layers % s == 0] if block.segment == 1 else [block.segment]
    fused = (False, True) if block.size(block.role("expert_shard")) > 1 else (False,)
    splits = SPLITS if block.size(block.role("model")) > 1 else SPLITS[:1]
    ways = [(f, s, False) for f in fused for s in splits]
    if block.streams(block.role("expert")) == STREAMS[1:]:
        ways.append((False, "tokens", True))
    for chunk, (exchange, split, staged) in itertools.product(CHUNKS, ways):
        with contextlib.suppress(ValueError):   # chunks along the sequence would drop tokens, or rows are ragged
            yield [replace(block, chunk=chunk, fused=exchange, split=split, hierarchical=staged, segment=s)
                   for s in segments]


def combined(trials: Trials, degrees: Iterable[Degrees], space: Space, known: float) -> Combination | None:
    """The fastest choice that fits in memory; None if none takes less than `known` seconds a segment.

    First come degrees that are equal for all parts, or 1 for the dense ones, at a middle number of slices; then degrees
    that differ in one direction or part; then slices; then degrees again.
    """
    if trials.least() >= known:
        return None
    start = Choice(Degrees(), PROBES, space.slices[len(space.slices) // 2])
    fit = [c for c in (replace(start, degrees=d) for d in degrees) if trials.fits(c)]
    plain = [c for c in fit if c.degrees.dense_forward in (1, c.degrees.moe_forward)] or fit
    best = _fastest(trials, plain, space, None, known)
    for others in (_other_degrees, _other_slices, _other_degrees):
        if best is not None:
            best = _fastest(trials, others(fit, best, space), space, best, known)
    return Combination(trials, best) if best is not None and trials.seconds(best) < known else None


def _other_degrees(fit: Iterable[Choice], best: Choice, space: Space) -> list[Choice]:
    """At the best one's number of slices, those that differ in one degree: forward or backward, MoE or the rest."""
    return [replace(c, slices=best.slices) for c in fit if c.degrees != best.degrees and (
        c.degrees.moe_forward == best.degrees.moe_forward or c.degrees.dense_forward == best.degrees.dense_forward and
        c.degrees.moe_backward == best.degrees.moe_backward)]


def _other_slices(fit: Iterable[Choice], best: Choice, space: Space) -> list[Choice]:
    return [replace(best, slices=n) for n in space.slices if n != best.slices]


def _fastest(trials: Trials, choices: Iterable[Choice], space: Space, best: Choice | None,
             known: float) -> Choice | None:
    """Of best and these choices, with their fastest orders, the fastest that fits and whose bound is below `known`.

    All orders are tried for those only that are among the fastest in the orders of the choices.
    """
    limit = known if best is None else min(known, trials.seconds(best))
    near = [c for c in choices if trials.bound(c) < limit and trials.probe(c) < limit * PROMISING]
    for choice in sorted(near, key=trials.probe)[:PROBED]:
        graph = trials.graph(choice)
        orders = Orders(trials.fastest_of(graph.forward, FORWARD), trials.fastest_of(graph.backward, BACKWARD))
        found = replace(choice, orders=orders)
        if (best is None or trials.seconds(found) < trials.seconds(best)) and (
                space.limit == math.inf or trials.memory(found, space.outside).total <= space.limit):
            best = found
    return best


def plan_memory(plan: Plan, outside: float = 0.0) -> Memory:
    """What a plan takes on a device: an estimate."""
    return estimate(plan.block, plan.graph, plan.forward, plan.backward, outside)


def does_not_fit(memory: Memory, limit: float, cluster: Cluster) -> str:
    """What must change for a plan that takes so much, the least of all, to fit."""
    largest = max(memory._asdict().items(), key=lambda item: item[1])[0]
    change = {"saved": "a smaller train.batch, a larger train.accumulate",
              "working": "more chunks (schedule.degrees), a smaller train.batch, a larger train.accumulate"}.get(
        largest, "parallel.fsdp, more devices for parallel.expert")
    return (f"device.memory_bytes of cluster {cluster.name!r} must hold a plan, got {limit / 1e9:.2f} GB, but the "
            f"smallest one takes {memory} (estimated), most of it for {largest}: use {change}, or a larger device")


def explain(plan: Plan, cluster: Cluster) -> str:
    """What bounds a plan, and how much faster it would be if something else was. All modelled."""
    t, block = simulate(plan, cluster), plan.block
    busy = ", ".join(f"{s} {t.busy_seconds[s] / t.makespan:.0%}" for s in STREAMS)
    critical = ", ".join(f"{s} {share:.0%}" for s, share in critical_shares(t).items() if share)
    return "\n".join([
        f"{plan.schedule}: {block.segment} layers together, cut along the {block.chunk}, degrees {plan.degrees}, "
        f"{'All-to-Alls in two steps, ' if block.hierarchical else ''}"
        f"{'one All-to-All over all parts of experts, ' if block.fused else ''}"
        f"{'slots shared out over model, ' if block.sharers > 1 else ''}gradients in {plan.slices}; "
        f"{t.makespan / t.bound_seconds - 1:.1%} above the bound of these tasks",
        f"busy: {busy}; on the longest chain of waiting: {critical}",
        *(f"{FASTER:g} times as fast {name}: {t.makespan / simulate(plan, other).makespan:.2f} x"
          for name, other in improvements(cluster).items())])


def critical_shares(timeline: Timeline) -> dict[str, float]:
    """Stream -> its share of a chain of tasks from start to end, each of which waited for the one before."""
    seconds = dict.fromkeys(STREAMS, 0.0)
    for event in timeline.critical_events:
        seconds[event.task.streams[-1]] += event.end - event.start
    total = math.fsum(seconds.values()) or 1.0
    return {s: v / total for s, v in seconds.items()}


def improvements(cluster: Cluster) -> dict[str, Cluster]:
    """The cluster with one thing `FASTER` times as fast."""
    product, memory = cluster.matmul, cluster.memory
    quick = product.model_copy(update={"seconds_per_flop": product.seconds_per_flop / FASTER})
    wide = memory.model_copy(update={"bytes_per_second": memory.bytes_per_second * FASTER})
    change = {"links between nodes": {"inter": _faster(cluster.inter)},
              "links inside nodes": {"intra": _faster(cluster.intra)},
              "matrix products": {"matmul": quick}, "memory": {"memory": wide}}
    return {name: cluster.model_copy(update=update) for name, update in change.items()}


def _faster(link: Link) -> Link:
    def half(cost: AlphaBeta | None) -> AlphaBeta | None:
        return cost and cost.model_copy(update={"seconds_per_byte": cost.seconds_per_byte / FASTER})

    return Link(**{kind: half(getattr(link, kind)) for kind in Link.model_fields})


# schedule.kind -> what makes the plan.
PLANNERS: dict[str, Callable[..., Plan]] = SCHEDULES | {"auto": plan}
