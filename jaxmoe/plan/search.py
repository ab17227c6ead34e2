"""The planner behind "auto": the fastest plan in simulation of all that the schedules can be combined to (ours).

What chunks are cut along, layers planned together, degrees, the order of each pass and slices of gradients are chosen
together, with the cluster's contention in the model. A cut goes no further if its bound, or its best order without
contention, is above what is found already; of the rest, the best orders are simulated with contention. Every schedule's
own plan competes, so that none is faster in simulation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .block import SAVED, Block
from .cluster import AlphaBeta, Cluster, Link
from .cost import durations
from .orders import Order, improved
from .plan import Plan
from .schedules import SCHEDULES, mast, sp_moe
from .schedules.base import SLICES, Choice, Orders, Trials, all_degrees
from .simulate import Timeline, simulate, slowdown
from .tasks import STREAMS, Degrees, TaskGraph

FORWARD: tuple[Order, ...] = (*mast.FORWARD, *dict.fromkeys(o.forward for o in sp_moe.ORDERS))
BACKWARD: tuple[Order, ...] = (*mast.BACKWARD, *dict.fromkeys(o.backward for o in sp_moe.ORDERS))
SEGMENTS = (1, 2)
TRIED = 3        # orders of a pass that are simulated with contention
FINISHED = 2     # combinations of which what flies beside what is tied
FASTER = 2.0     # what `explain` tries


@dataclass(frozen=True)
class Found:
    """timeline: the plan's. seconds: modelled, of the stack, by schedule; "auto" is the plan's."""

    plan: Plan
    timeline: Timeline
    seconds: Mapping[str, float]


def plan(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
         saved: tuple[str, ...] = SAVED) -> Plan:
    """degrees, slices: None = the fastest in simulation."""
    return search(block, cluster, degrees, slices, saved).plan


def search(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
           saved: tuple[str, ...] = SAVED) -> Found:
    """The fastest plan, and how long each schedule's own takes. Raises ValueError if the block can be cut like none."""
    plans = _singles(block, cluster, degrees, slices, saved)
    timed = [(simulate(p, cluster), p) for p in plans.values()]
    seconds = {name: timeline.makespan for name, (timeline, _) in zip(plans, timed, strict=True)}
    known = min(seconds.values(), default=math.inf)
    counts = [slices] if slices else SLICES
    combinations: list[Combination] = []
    for cuts in variants(block):
        given = [degrees] if degrees else all_degrees(cuts[0])
        for cut in cuts:   # longer segments take the degrees of shorter ones
            found = combined(Trials(cut, cluster, saved, slowdown(cluster)), given, counts, known)
            if found is not None:
                combinations.append(found)
                known, given = min(known, found.seconds), [found.choice.degrees]
    for found in sorted(combinations, key=lambda c: c.seconds)[:FINISHED]:
        made = found.plan()
        timed.append((simulate(made, cluster), made))
    if not timed:
        raise ValueError("schedule.degrees: this block cannot be cut at any of the degrees tried")
    timeline, best = min(timed, key=lambda pair: pair[0].makespan)
    return Found(replace(best, schedule="auto"), timeline, seconds | {"auto": timeline.makespan})


def _singles(block: Block, cluster: Cluster, degrees, slices, saved) -> dict[str, Plan]:
    found = {}
    for name, schedule in SCHEDULES.items():
        with contextlib.suppress(ValueError):   # not for this block
            found[name] = schedule(block, cluster, degrees, slices=slices, saved=saved)
    return found


def variants(block: Block) -> Iterator[list[Block]]:
    """For each way to cut chunks and to exchange rows, the block at its segment, or at `SEGMENTS` if that is 1."""
    segments = [s for s in SEGMENTS if block.layers % s == 0] if block.segment == 1 else [block.segment]
    fused = (False, True) if block.size(block.role("expert_shard")) > 1 else (False,)
    splits = ("tokens", "slots") if block.size(block.role("model")) > 1 else ("tokens",)
    for chunk, exchange, split in itertools.product(("slots", "batch", "sequence"), fused, splits):
        with contextlib.suppress(ValueError):   # chunks along the sequence would drop tokens, or rows are ragged
            yield [replace(block, chunk=chunk, fused=exchange, split=split, segment=s) for s in segments]


@dataclass(frozen=True)
class Combination:
    """A choice for a block (that of trials), and about how long its stack takes."""

    trials: Trials
    choice: Choice

    @property
    def graph(self) -> TaskGraph:
        return self.trials.graph(self.choice)

    @property
    def seconds(self) -> float:
        """All segments and the last one's reductions, one after the other, before what flies beside what is tied."""
        block = self.trials.block
        tail = math.fsum(durations(self.graph.tail, self.trials.cluster).values())
        return self.trials.seconds(self.choice) * (block.layers // block.segment) + tail

    def plan(self) -> Plan:
        """With improved orders where they pay."""
        orders = self.choice.orders
        sure = Orders(self.trials.surest(self.graph.forward, (*FORWARD, improved(orders.forward))),
                      self.trials.surest(self.graph.backward, (*BACKWARD, improved(orders.backward))))
        return self.trials.plan("auto", replace(self.choice, orders=sure))


def combined(trials: Trials, degrees: Iterable[Degrees], slices: Sequence[int], known: float) -> Combination | None:
    """The fastest choice; None if no stack takes less than `known` seconds without contention."""
    best, count = None, trials.block.layers // trials.block.segment
    for d in degrees:
        choice = Choice(d, Orders(FORWARD[0], BACKWARD[0]), slices[0])
        if not trials.fits(choice) or trials.bound(choice) * count >= known:
            continue
        choice = _ordered(trials, choice, known / count)
        if choice is not None and (best is None or trials.seconds(choice) < trials.seconds(best)):
            best = choice
    if best is None:
        return None
    others = [_ordered(trials, replace(best, slices=n), trials.seconds(best)) for n in slices[1:]]
    return Combination(trials, min([best, *(o for o in others if o is not None)], key=trials.seconds))


def _ordered(trials: Trials, choice: Choice, known: float) -> Choice | None:
    """With the fastest orders of those that are among the fastest without contention, if these take less than known."""
    graph = trials.graph(choice)
    ranked = [sorted(orders, key=lambda order, p=pass_: trials.alone(p, order))[:TRIED]
              for pass_, orders in ((graph.forward, FORWARD), (graph.backward, BACKWARD))]
    if trials.alone(graph.forward, ranked[0][0]) + trials.alone(graph.backward, ranked[1][0]) >= known:
        return None
    forward = min(ranked[0], key=lambda order: trials.pass_seconds(graph.forward, order))
    backward = min(ranked[1], key=lambda order: trials.pass_seconds(graph.backward, order))
    return replace(choice, orders=Orders(forward, backward))


def explain(plan: Plan, cluster: Cluster) -> str:
    """What bounds a plan, and how much faster it would be if something else was. All modelled."""
    t, block = simulate(plan, cluster), plan.block
    busy = ", ".join(f"{s} {t.busy_seconds[s] / t.makespan:.0%}" for s in STREAMS)
    critical = ", ".join(f"{s} {share:.0%}" for s, share in critical_shares(t).items() if share)
    return "\n".join([
        f"{plan.schedule}: {block.segment} layers together, cut along the {block.chunk}, degrees {plan.degrees}, "
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
