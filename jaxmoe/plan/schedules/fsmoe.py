"""FSMoE: links inside and between nodes at work at once, and dense gradients reduced in what is left. (read)

    inter    D0 D1 D2 D3 [G]             C0 C1 C2 C3
    intra       g0 g1 g2 g3    s0 s1 s2 s3
    compute        E0 E1 E2 E3                        attention

D dispatch, g expert_gather, E experts, s expert_reduce, C combine. Where experts are spread over both links, the
steps of a hierarchical All-to-All (`schedule.hierarchical`) within nodes take the places of g and s. Three loops issue
all (D, g), all (E, s), all C; the backward pass does the same from C's side, with its own degree. There, slices [G] of
the dense gradients of the segment above follow a layer's last dispatch, as far as they fit the time in which the link
is idle (closed forms, read; greedy), then beside the layer's attention (its "dense part's own backward"); what fits
nowhere joins the last of these. Order and spans are forced; inside a task all is XLA's. Degrees and the number of
slices are chosen by simulation (ours; the paper solves for them). No value changes. It wins where experts are spread
over nodes and split inside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate

from ..closed_forms import fsmoe_slack_seconds, partition_gradients, place_rest
from ..orders import remembered
from ..tasks import Pass, Task
from . import pipemoe
from .base import SLICES, Key, Orders, Schedule, by, merged, moe_degrees

Place = tuple[int, float]   # minus the layer, and rank among its collectives
IN_MOE, BESIDE_DENSE = 1.5, 2.5
DENSE = ("pack", "route", "attn_out", "attend", "attn_in")


def backward(pass_: Pass, seconds: Mapping[str, float]) -> tuple[str, ...]:
    """PipeMoE's order on each of three streams, with slices in their places."""
    return placed(pass_, seconds, pipemoe.backward)


def placed(pass_: Pass, seconds: Mapping[str, float], key: Key) -> tuple[str, ...]:
    """Tasks sorted by key, slices where links are idle. key: (1, -layer, rank, ...) for tasks of a layer."""
    places = slice_places(pass_, seconds)
    return remembered(pass_, (key, *places.items()), lambda: merged(
        pass_, lambda task: (1, *places[task.name]) if task.name in places else key(task)))


def slice_places(pass_: Pass, seconds: Mapping[str, float]) -> dict[str, Place]:
    """Slice -> its place: each place's share of bytes by the greedy step, slices dealt out in their order."""
    slices = [t for t in pass_.tasks if t.verb == "grad_reduce"]
    if not slices:
        return {}
    layers = sorted({t.layer for t in pass_.tasks}, reverse=True)
    places = [(-layer, rank) for layer in layers for rank in (IN_MOE, BESIDE_DENSE)]
    slack = [s for layer in layers for s in slacks([t for t in pass_.tasks if t.layer == layer], seconds)]
    shares = shares_of(slices, seconds, slack)
    return dict(zip((t.name for t in slices), dealt(slices, places, shares), strict=True))


def slacks(tasks: list[Task], seconds: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of a layer's backward pass in which links between nodes are idle: in MoE, and beside attention."""
    total = lambda *verbs: math.fsum(seconds[t.name] for t in tasks if t.verb in verbs and t.of)  # noqa: E731
    r = max(1, sum(t.verb == "experts_down" and t.direction == "input_grad" for t in tasks))
    a, g, s = (total(*verbs) / r for verbs in (
        ("combine",), ("expert_reduce", "combine_within"), ("expert_gather", "dispatch_within")))
    e = total("experts_up", "experts_down") / r
    return fsmoe_slack_seconds(a, g, s, e, r), total(*DENSE)


def shares_of(slices: list[Task], seconds: Mapping[str, float], slack: list[float]) -> list[float]:
    """Bytes for each place. A slice's time is taken for α + β bytes, with β as if there was no α (safe)."""
    total = math.fsum(t.bytes for t in slices)
    per_byte = math.fsum(seconds[t.name] for t in slices) / total
    pending = [total, *[0.0] * (len(slack) - 1)]
    taken, left = partition_gradients(pending, slack, 0.0, per_byte)
    return place_rest(taken, pending, left, per_byte)


def dealt(slices: list[Task], places: list[Place], shares: list[float]) -> list[Place]:
    """The place of each slice: where the middle of its bytes falls."""
    ends, found, at = list(accumulate(shares)), [], 0.0
    for task in slices:
        middle, at = at + task.bytes / 2, at + task.bytes
        found.append(next((p for p, end in zip(places, ends, strict=True) if middle <= end), places[-1]))
    return found


ORDERS = Orders(by(pipemoe.forward), backward)


SCHEDULE = Schedule("fsmoe", (ORDERS,), moe_degrees, SLICES)
