"""What schedules share: from an order on each stream to a plan, and the choice of degrees by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..block import SAVED, Block
from ..cluster import Cluster
from ..cost import durations
from ..simulate import issue_order, pin, simulate_pass
from ..tasks import STREAMS, Degrees, Pass, Plan, Span, Task

DEGREES = (1, 2, 4, 8)
Key = Callable[[Task], tuple]


@dataclass(frozen=True)
class Orders:
    """How a schedule sorts each stream's tasks, forward and backward; ties keep the order of the graph."""

    forward: Key
    backward: Key


def merged(pass_: Pass, key: Key) -> tuple[str, ...]:
    """An issue order in which each stream serves its tasks sorted by key.

    Raises ValueError if the sorted streams wait for each other.
    """
    ranked = sorted(pass_.tasks, key=key)
    queues = {s: [t for t in ranked if s in t.streams] for s in STREAMS}
    heads, done, order = dict.fromkeys(STREAMS, 0), set(), []
    while len(order) < len(ranked):
        for s in STREAMS:
            at = heads[s]
            task = queues[s][at] if at < len(queues[s]) else None
            if task is not None and all(queues[o][heads[o]] is task for o in task.streams) and (
                    set(pass_.after[task.name]) <= done):
                break
        else:
            stuck = next(queues[s][heads[s]].name for s in STREAMS if heads[s] < len(queues[s]))
            raise ValueError(f"the streams' orders wait for each other at task {stuck!r}")
        order.append(task.name)
        done.add(task.name)
        for s in task.streams:
            heads[s] += 1
    return tuple(order)


def timed(pass_: Pass, key: Key, cluster: Cluster, tied: bool) -> tuple[tuple[str, ...], tuple[Span, ...], float]:
    """Issue order, spans and seconds of a pass. tied: False leaves what flies beside what to the compiler."""
    seconds = durations(pass_, cluster)
    order = merged(pass_, key)
    timeline = simulate_pass(pass_, order, seconds)
    if not tied:
        return issue_order(timeline), (), timeline.makespan
    order, spans, timeline = pin(pass_, issue_order(timeline), seconds)
    return order, spans, timeline.makespan


def build(
    name: str, block: Block, cluster: Cluster, orders: Orders, degrees: Degrees, *, tied: bool = True,
    saved: tuple[str, ...] = SAVED, slices: int = 1,
) -> Plan:
    """The plan of a schedule at given degrees."""
    graph = block.graph(degrees, saved, slices)
    forward, forward_spans, _ = timed(graph.forward, orders.forward, cluster, tied)
    backward, backward_spans, _ = timed(graph.backward, orders.backward, cluster, tied)
    return Plan(name, block, degrees, forward, backward, forward_spans, backward_spans, saved, slices).check()


def best_degrees(
    block: Block, cluster: Cluster, orders: Orders, candidates: Iterable[Degrees], *, tied: bool = True,
    saved: tuple[str, ...] = SAVED, slices: int = 1,
) -> Degrees:
    """The fastest degrees in simulation, forward and backward chosen apart where the block can cut them apart."""
    best: dict[str, tuple[float, Degrees]] = {}
    seen: dict[tuple, float] = {}
    for d in candidates:
        try:
            graph = block.graph(d, saved, slices)
        except ValueError:   # the block cannot be cut so
            continue
        times = {}
        for half, pass_, key in (("forward", graph.forward, orders.forward),
                                 ("backward", graph.backward, orders.backward)):
            mark = (half, getattr(d, f"moe_{half}"), getattr(d, f"dense_{half}"))
            if mark not in seen:
                seen[mark] = timed(pass_, key, cluster, tied)[2]
            times[half] = seen[mark]
        total = times["forward"] + times["backward"]
        if "both" not in best or total < best["both"][0]:
            best["both"] = (total, d)
    if not best:
        raise ValueError("schedule.degrees: this block cannot be cut at any of the degrees tried")
    return best["both"][1]


def moe_degrees(block: Block) -> list[Degrees]:
    """Degrees of MoE parts to try: forward and backward apart, where the layout allows it."""
    if block.chunk != "slots":
        return [Degrees(r, r, r, r) for r in DEGREES]
    if block.layout == "ragged":
        return [Degrees(r, r) for r in DEGREES]
    return [Degrees(f, b) for f in DEGREES for b in DEGREES]


def place(task: Task, ranks: dict[str, int], default: int = 0) -> int:
    """Rank of a task's verb; backward tasks are looked up as "verb:suffix"."""
    suffix = task.name.partition(":")[2]
    return ranks.get(f"{task.verb}:{suffix}" if suffix else task.verb, default)
