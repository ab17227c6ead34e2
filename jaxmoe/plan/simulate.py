"""Event simulation of a plan: when each task starts and ends, given the seconds that each takes alone.

A task starts when those it reads from have ended and its streams have served all tasks issued before it. A span ties
its collective to compute tasks at both ends: it starts together with the first one, and neither its result nor the last
one's counts as done before both are (the barriers that the executor sets do just this).

Two things may make tasks slower than alone (both ours): contention for streaming multiprocessors and memory while
compute and links are busy at once, and an overlap efficiency below 1, the share of hidden time that is really hidden.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from .cluster import Cluster
from .cost import durations as cost_durations
from .plan import Plan
from .tasks import STREAMS, Pass, Span, Task

COMPUTE, INTRA, INTER = 1, 2, 4
BITS: dict[str, int] = {"compute": COMPUTE, "intra": INTRA, "inter": INTER}


class Event(NamedTuple):
    """A task from start to end, in seconds; segment counts the passes of the timeline, forward then backward."""

    task: Task
    start: float
    end: float
    segment: int = 0


@dataclass(frozen=True)
class Slowdown:
    """Factors on times while compute and links are busy at once: on compute beside intra, inter or both; on links.

    links_wait: a collective that becomes ready while a compute task runs waits for its end.
    """

    beside_intra: float = 1.0
    beside_inter: float = 1.0
    beside_both: float = 1.0
    link: float = 1.0
    links_wait: bool = False

    def of_compute(self, links: int) -> float:
        return {0: 1.0, INTRA: self.beside_intra, INTER: self.beside_inter}.get(links, self.beside_both)


def slowdown(cluster: Cluster) -> Slowdown | None:
    """S / (S - c) for compute, S the device's SMs and c those that the links in use hold; None if nothing is known."""
    facts = cluster.contention
    if facts is None:
        return None
    if facts.compute_slowdown is not None:
        alike = facts.compute_slowdown
        return Slowdown(alike, alike, alike, facts.link_slowdown, facts.links_wait)
    sms, intra, inter = cluster.device.sms, facts.sms_for_links.get("intra", 0), facts.sms_for_links.get("inter", 0)
    if sms is None or sms <= intra + inter:
        raise ValueError(f"device.sms of cluster {cluster.name!r} must be more than the {intra + inter} of "
                         f"contention.sms_for_links, got {sms}")
    return Slowdown(sms / (sms - intra), sms / (sms - inter), sms / (sms - intra - inter), facts.link_slowdown,
                    facts.links_wait)


@dataclass(frozen=True)
class Timeline:
    """events: in order of issue. before: for each event, those that it waited for. bound_seconds: no order of these
    tasks can take less."""

    events: tuple[Event, ...]
    before: tuple[tuple[int, ...], ...]
    bound_seconds: float

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((e.end for e in self.events), default=0.0)

    @cached_property
    def busy_seconds(self) -> dict[str, float]:
        """Stream -> seconds in which it runs a task."""
        return {s: math.fsum(e.end - e.start for e in self.events if s in e.task.streams) for s in STREAMS}

    @cached_property
    def exposed(self) -> tuple[tuple[float, float], ...]:
        """Intervals in which a link is busy and compute is not."""
        return tuple((a, b) for a, b, streams in self.intervals if streams and not streams & COMPUTE)

    @cached_property
    def exposed_seconds(self) -> float:
        return math.fsum(b - a for a, b in self.exposed)

    @cached_property
    def intervals(self) -> tuple[tuple[float, float, int], ...]:
        """(start, end, busy streams as bits), from each start or end of an event to the next."""
        changes = sorted((t, sign * _mask(e.task)) for e in self.events for t, sign in ((e.start, 1), (e.end, -1)))
        busy = accumulate(bits for _, bits in changes)
        return tuple((a, b, now) for ((a, _), (b, _)), now in zip(pairwise(changes), busy, strict=False) if b > a)

    @cached_property
    def critical_path(self) -> tuple[str, ...]:
        """Names of tasks, each of which started when the one before it ended, from 0 to the makespan."""
        return tuple(e.task.name for e in self.critical_events)

    @cached_property
    def critical_events(self) -> tuple[Event, ...]:
        path, at = [], max(range(len(self.events)), key=lambda i: self.events[i].end, default=-1)
        while at >= 0:
            path.append(self.events[at])
            at = max(self.before[at], key=lambda i: self.events[i].end, default=-1)
        return tuple(reversed(path))


class Prepared:
    """A pass, its order and its spans as indices, to be simulated many times.

    before: for each task in order, the tasks that must have ended, streams and spans included.
    """

    def __init__(self, pass_: Pass, order: Sequence[str], spans: Iterable[Span] = ()):
        wiring = pass_.wiring
        listed = [wiring.index[name] for name in order]
        place = {i: k for k, i in enumerate(listed)}
        self.tasks = tuple(pass_.tasks[i] for i in listed)
        self.reads = [tuple([place[j] for j in wiring.reads[i]]) for i in listed]
        self.masks = [_mask(t) for t in self.tasks]
        self.in_line = any([m & COMPUTE and m & ~COMPUTE for m in self.masks])
        self.index = {name: k for k, name in enumerate(order)}
        before, last = [], [-1] * len(STREAMS)
        for k, i in enumerate(listed):
            held = wiring.streams[i]
            queued = [last[s] for s in held if last[s] >= 0 and last[s] not in self.reads[k]]
            before.append((*self.reads[k], *dict.fromkeys(queued)))
            for s in held:
                last[s] = k
        self.before: tuple[tuple[int, ...], ...] = tuple(before)
        self.spans: tuple[Span, ...] = ()
        if spans := tuple(spans):
            self._tie(_after(self.before), spans)

    def tied(self, spans: Iterable[Span]) -> Prepared:
        """With these spans; `self` must have none."""
        found = copy(self)
        for name in ("after", "sweep"):
            found.__dict__.pop(name, None)
        found._tie(self.after, tuple(spans))
        return found

    def _tie(self, after: Sequence[Sequence[int]], spans: tuple[Span, ...]) -> None:
        """after: what waits for each task without spans."""
        numbers = [(self.index[s.task], self.index[s.first], self.index[s.last]) for s in spans]
        self.before, self.spans = _tied(self.before, after, numbers), spans

    @cached_property
    def sweep(self) -> list[tuple[int, tuple[int, ...]]]:
        """(task, before), each after those it waits for. Raises ValueError if tasks wait for each other."""
        after, missing = self.after, [len(b) for b in self.before]
        ready = [i for i, m in enumerate(missing) if not m]
        for i in ready:
            for j in after[i]:
                missing[j] -= 1
                if not missing[j]:
                    ready.append(j)
        if len(ready) < len(self.tasks):
            raise self._stuck(missing)
        return [(i, self.before[i]) for i in ready]

    def _stuck(self, missing: Sequence[int]) -> ValueError:
        stuck = {t.name for t, m in zip(self.tasks, missing, strict=True) if m}
        span = next((s for s in self.spans if s.task in stuck), None)
        if span is None:
            return ValueError(f"order has task {min(stuck)!r} wait for one that its streams serve later")
        return ValueError(f"span of {span.task!r} from {span.first!r} to {span.last!r} ties tasks that wait for "
                          "each other")

    @cached_property
    def after(self) -> list[list[int]]:
        """For each task, those that wait for it."""
        return _after(self.before)

    def ends(self, seconds: Sequence[float]) -> list[float]:
        """End of each task in order, from its seconds."""
        end = [0.0] * len(self.tasks)
        for i, before in self.sweep:
            start = 0.0
            for j in before:
                if end[j] > start:
                    start = end[j]
            end[i] = start + seconds[i]
        return end

    def makespan(self, durations: Mapping[str, float], contention: Slowdown | None = None) -> float:
        """Seconds of the pass."""
        seconds = [durations[t.name] for t in self.tasks]
        return max(self._contend(seconds, contention)[1] if contention else self.ends(seconds), default=0.0)

    def makespans(self, durations: Mapping[str, np.ndarray], efficiency: float = 1.0) -> np.ndarray:
        """Seconds of many cases at once: `makespan` for arrays of durations, with an overlap efficiency."""
        end: list[np.ndarray] = [np.zeros(())] * len(self.tasks)
        for i, before in self.sweep:
            start = end[before[0]] if before else np.zeros(())
            for j in before[1:]:
                start = np.maximum(start, end[j])
            end[i] = start + durations[self.tasks[i].name]
        last = np.maximum.reduce(np.broadcast_arrays(*end))
        alone = sum(durations[t.name] for t in self.tasks)
        return efficiency * last + (1 - efficiency) * alone

    def run(self, durations: Mapping[str, float], contention: Slowdown | None = None,
            efficiency: float = 1.0) -> Timeline:
        seconds = [durations[t.name] for t in self.tasks]
        start, end, before = self.times(seconds, contention)
        bound = self.bound(seconds)
        if efficiency < 1:
            start, end = _dilate(start, end, efficiency)
            bound = efficiency * bound + (1 - efficiency) * math.fsum(seconds)
        return Timeline(tuple(map(Event, self.tasks, start, end)), before, bound)

    def times(self, seconds: Sequence[float], contention: Slowdown | None = None):
        """Starts, ends, and what each task waited for."""
        if contention:
            return self._contend(seconds, contention)
        end = self.ends(seconds)
        return [max([end[j] for j in b], default=0.0) for b in self.before], end, self.before

    def bound(self, seconds: Sequence[float]) -> float:
        """No order of these tasks takes less."""
        return least_seconds(self.reads, [t.streams for t in self.tasks], seconds)

    def _contend(self, seconds: Sequence[float], slow: Slowdown):
        """Starts, ends and what was waited for, when tasks in flight slow each other; at most one a stream flies."""
        masks, after = self.masks, self.after
        missing, before = [len(b) for b in self.before], list(self.before)
        start, end = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        left, now, busy = list(seconds), 0.0, 0
        ready, flying, held = [i for i, m in enumerate(missing) if not m], [], []
        while ready or flying:
            if slow.links_wait and busy & COMPUTE:
                held += [i for i in ready if masks[i] != COMPUTE]
                ready = [i for i in ready if masks[i] == COMPUTE]
            for i in ready:
                start[i] = now
                busy |= masks[i]
            flying += ready
            both = busy & COMPUTE and busy & ~COMPUTE and (   # by two tasks: one in line holds both alone
                not self.in_line or any([masks[i] == COMPUTE for i in flying]))
            compute, link = (slow.of_compute(busy & ~COMPUTE), slow.link) if both else (1.0, 1.0)
            takes = [left[i] * (compute if masks[i] == COMPUTE else link) for i in flying]
            step = min(takes)
            now += step
            flown, flying, ready = flying, [], []
            for i, seconds_left in zip(flown, takes, strict=True):
                if seconds_left > step:
                    left[i] *= 1 - step / seconds_left
                    flying.append(i)
                    continue
                end[i] = now
                busy &= ~masks[i]
                for j in after[i]:
                    missing[j] -= 1
                    if not missing[j]:
                        ready.append(j)
                if masks[i] == COMPUTE and held:
                    for j in held:
                        before[j] = (*before[j], i)
                    ready, held = held + ready, []
        if any(missing):
            raise self._stuck(missing)
        return start, end, tuple(before)


def least_seconds(reads: Sequence[Sequence[int]], streams: Sequence[Sequence[Any]], seconds: Sequence[float],
                  order: Sequence[int] = ()) -> float:
    """What no order takes less than: the busiest stream with what must precede and follow it, or the longest chain.

    reads: for each task, those whose results it needs. order: each behind what it reads, by default as listed.
    """
    n = len(reads)
    order = order or range(n)
    head, tail = [0.0] * n, [0.0] * n
    for i in order:
        for j in reads[i]:
            if head[j] + seconds[j] > head[i]:
                head[i] = head[j] + seconds[j]
    for i in reversed(order):
        behind = tail[i] + seconds[i]
        for j in reads[i]:
            if behind > tail[j]:
                tail[j] = behind
    least = max([h + s + t for h, s, t in zip(head, seconds, tail, strict=True)], default=0.0)
    queues: dict[Any, list[int]] = {}
    for i, held in enumerate(streams):
        for stream in held:
            queues.setdefault(stream, []).append(i)
    return max([least, *(min(head[i] for i in q) + math.fsum(seconds[i] for i in q) + min(tail[i] for i in q)
                         for q in queues.values())])


def simulate_pass(pass_: Pass, order: Sequence[str], durations: Mapping[str, float], spans: Iterable[Span] = (),
                  contention: Slowdown | None = None, efficiency: float = 1.0) -> Timeline:
    """Timeline of one pass, tasks issued in this order."""
    return Prepared(pass_, order, spans).run(durations, contention, efficiency)


def simulate(plan: Plan, cluster: Cluster, layers: int = 0, contention: bool = True) -> Timeline:
    """Timeline of a training step's blocks: forward of all segments, then backward of all; nothing flies over a border.

    A segment's gradients are reduced in the backward pass of the one before it, and the first one's after everything.
    layers: of the stack; 0 for those of the plan's block, others for an excerpt from the middle of it. contention:
    False leaves out the cluster's.

    Example: ``made = jaxmoe.plan(jaxmoe.load_config("configs/mixtral-8x7b-8x8-h100.toml")); timeline =
    jaxmoe.simulate(made, jaxmoe.load_cluster("8x8-h100")); print(timeline.makespan)``
    """
    times, rest = divmod(layers or plan.block.layers, plan.block.segment)
    if times < 1 or rest:
        raise ValueError(f"layers must be a multiple of the plan's segment of {plan.block.segment}, got {layers}")
    slow, efficiency = slowdown(cluster) if contention else None, cluster.overlap.efficiency
    graph = plan.graph

    def run(pass_: Pass, order: Sequence[str], spans: Iterable[Span] = ()) -> Timeline:
        return simulate_pass(pass_, order, cost_durations(pass_, cluster), spans, slow, efficiency)

    forward = run(graph.forward, plan.forward, plan.forward_spans)
    backward = run(graph.backward, plan.backward, plan.backward_spans)
    if layers and layers != plan.block.layers:
        return join([forward] * times + [backward] * times)
    own = [t for t in graph.backward.tasks if t.verb != "grad_reduce"]
    names = {t.name for t in own}
    last = run(Pass(tuple(own)), [n for n in plan.backward if n in names],
               [s for s in plan.backward_spans if s.task in names])
    tail = [run(graph.tail, tuple(graph.tail.by_name))] if graph.tail.tasks else []
    return join([forward] * times + [last] + [backward] * (times - 1) + tail)


def join(parts: Sequence[Timeline]) -> Timeline:
    """Timelines one after the other."""
    events: list[Event] = []
    before: list[tuple[int, ...]] = []
    now, last = 0.0, -1
    for segment, part in enumerate(parts):
        base = len(events)
        events += [Event(e.task, e.start + now, e.end + now, segment) for e in part.events]
        before += [tuple(base + j for j in b) or ((last,) if last >= 0 else ()) for b in part.before]
        now += part.makespan
        last = max(range(base, len(events)), key=lambda i: events[i].end, default=last)
    return Timeline(tuple(events), tuple(before), math.fsum(p.bound_seconds for p in parts))


def issue_order(timeline: Timeline) -> tuple[str, ...]:
    """Names of tasks by their start, a collective before a compute task that starts at the same time."""
    after, missing = _after(timeline.before), [len(b) for b in timeline.before]
    keys = [(e.start, not e.task.is_collective, i) for i, e in enumerate(timeline.events)]
    heap = [key for key, m in zip(keys, missing, strict=True) if not m]
    heapq.heapify(heap)
    order = []
    while heap:
        *_, i = heapq.heappop(heap)
        order.append(timeline.events[i].task.name)
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(heap, keys[j])
    return tuple(order)


def _mask(task: Task) -> int:
    return sum(BITS[s] for s in task.streams)


def _after(before: Sequence[Iterable[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for i, earlier in enumerate(before):
        for j in earlier:
            after[j].append(i)
    return after


def _tied(before: Sequence[tuple[int, ...]], after: Sequence[Sequence[int]],
          spans: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    """What tasks wait for with spans (collective, first, last): ties at the end, then at the start."""
    tied = list(before)
    ends: dict[int, dict[int, None]] = {}
    starts: dict[int, dict[int, None]] = {}
    for task, first, last in spans:
        ends.setdefault(last, {last: None})[task] = None
        starts.setdefault(first, {first: None})[task] = None
    for group in ends.values():
        for waiting in {j for i in group for j in after[i]}:
            tied[waiting] = tuple(dict.fromkeys((*tied[waiting], *group)))
    for group in starts.values():
        union = tuple(dict.fromkeys(j for i in group for j in tied[i]))
        for i in group:
            tied[i] = union
    return tuple(tied)


def _dilate(start: list[float], end: list[float], efficiency: float) -> tuple[list[float], list[float]]:
    """Times when n tasks in flight take 1 + (n - 1)(1 - efficiency) times as long as in the ideal case."""
    changes = sorted([(t, 1) for t in start] + [(t, -1) for t in end])
    real, now, flying = {changes[0][0]: changes[0][0]}, changes[0][0], changes[0][1]
    for (a, _), (b, sign) in pairwise(changes):
        now += (b - a) * (1 + max(flying - 1, 0) * (1 - efficiency))
        real[b] = now
        flying += sign
    return [real[t] for t in start], [real[t] for t in end]
