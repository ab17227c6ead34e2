"""What flies beside what: spans that tie collectives to the compute tasks of a simulated pass."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from .simulate import Event, Prepared, Slowdown, Timeline, issue_order
from .tasks import Pass, Span

WORTH = 0.05   # of a collective's time: compute tasks shorter than this are not planned beside it
_START = attrgetter("start")


def spans_of(timeline: Timeline) -> tuple[Span, ...]:
    """What flies beside what: each collective with the compute tasks that start while it flies, up to the last which
    shares half of the shorter one's time with it. They fit `issue_order(timeline)`.

    A compute task that is already running when the collective starts cannot be tied: it would have to wait for it.
    """
    compute = _by_start(timeline.events, False)
    spans = []
    for event in _by_start(timeline.events, True):
        beside = _beside(event, compute)
        if beside:
            spans.append(Span(event.task.name, beside[0].task.name, beside[-1].task.name))
    return tuple(spans)


def pin(pass_: Pass, order: Sequence[str], durations: Mapping[str, float], slack: float = 1e-2,
        contention: Slowdown | None = None) -> tuple[tuple[str, ...], tuple[Span, ...], Timeline]:
    """Order, spans and timeline in which as many collectives as possible are tied to what runs beside them (greedy).

    Each collective in turn is tied to the compute tasks that start while it flies; or the one before is delayed to
    start with it; or it is delayed to start with the next one. The makespan stays within (1 + slack) of the untied
    one's. Streams keep their order.
    """
    free = Prepared(pass_, order)
    seconds = [durations[t.name] for t in free.tasks]
    events, before = _events(free, seconds, contention)
    limit = max([e.end for e in events], default=0.0) * (1 + slack)
    spans: tuple[Span, ...] = ()
    for event in _by_start(events, True):
        for span in candidates(events, event.task.name):
            try:
                trial = _events(free.tied((*spans, span)), seconds, contention)
            except ValueError:   # the tasks wait for each other
                continue
            if max([e.end for e in trial[0]]) <= limit:
                spans, (events, before) = (*spans, span), trial
                break
    timeline = Timeline(tuple(events), before, free.bound(seconds))
    return issue_order(timeline), spans, timeline


def _events(prepared: Prepared, seconds: Sequence[float], contention: Slowdown | None):
    """Events in order of issue, and what each waited for."""
    start, end, before = prepared.times(seconds, contention)
    return list(map(Event, prepared.tasks, start, end)), before


def sure_seconds(pass_: Pass, order: Sequence[str], durations: Mapping[str, float], spans: Iterable[Span],
                 contention: Slowdown | None = None) -> float:
    """Seconds of the pass if the compiler leaves every collective in line that no span ties to something."""
    spans = tuple(spans)
    tied = {s.task for s in spans}
    tasks = (replace(t, streams=("compute", *t.streams)) if t.is_collective and t.name not in tied else t
             for t in pass_.tasks)
    return Prepared(Pass(tuple(tasks)), order, spans).makespan(durations, contention)


def candidates(events: Sequence[Event], name: str) -> list[Span]:
    """Spans of a collective, those that delay nothing first."""
    event = next(e for e in events if e.task.name == name)
    compute = [e for e in _by_start(events, False) if _counts(event, e)]
    at = bisect_left([e.start for e in compute], event.start)
    beside = _beside(event, compute)
    earlier, later = compute[max(at - 1, 0):at], compute[at:at + 1]
    firsts = beside[:1] + earlier + [e for e in later if not beside]
    return list(dict.fromkeys(Span(name, first.task.name, last.task.name)
                              for first in firsts for last in (*beside[-1:], first)))


def _by_start(events: Iterable[Event], collectives: bool) -> list[Event]:
    return sorted([e for e in events if e.task.is_collective == collectives], key=_START)


def _beside(event: Event, compute: list[Event]) -> list[Event]:
    """Of tasks sorted by start, those that start while the event lasts, and share half of the shorter one's time.

    Not those that are over in no time: they hide nothing, and may have no instruction of their own when compiled.
    """
    near = compute[bisect_left(compute, event.start, key=lambda e: e.start):
                   bisect_left(compute, event.end, key=lambda e: e.start)]
    return [e for e in near if _share(event, e) >= 0.5 and _counts(event, e)]


def _counts(event: Event, other: Event) -> bool:
    return other.end - other.start >= WORTH * (event.end - event.start)


def _share(one: Event, other: Event) -> float:
    """Time that two events share, over the shorter one's."""
    shorter = min(one.end - one.start, other.end - other.start)
    return (min(one.end, other.end) - max(one.start, other.start)) / shorter if shorter > 0 else 0.0
