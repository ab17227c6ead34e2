"""A timeline as a picture, as a trace for Perfetto or chrome://tracing, and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .simulate import Event, Timeline
from .tasks import STREAMS

# A hue an activity: attention blue, routing grey, experts red, All-to-All green, node-wide collectives yellow to brown.
COLOURS = {
    "attn_in": "#9ecae1", "attend": "#3182bd", "attn_out": "#6baed6", "route": "#bdbdbd", "statistics": "#d9d9d9",
    "pack": "#969696", "unpack": "#737373", "dispatch": "#31a354", "combine": "#a1d99b",
    "dispatch_within": "#41ab5d", "combine_within": "#c7e9c0", "experts": "#e6550d",
    "experts_up": "#e6550d", "experts_down": "#fd8d3c", "shared_up": "#fdae6b", "shared_down": "#fdd0a2",
    "expert_gather": "#fec44f", "expert_reduce": "#d95f0e", "model_gather": "#ffe08a", "model_scatter": "#b8860b",
    "token_gather": "#fff7bc", "combine_gather": "#fe9929", "combine_split": "#c7e9c0", "combine_join": "#74c476",
    "grad_reduce": "#756bb1", "param_gather": "#9e9ac8", "encode": "#f768a1", "decode": "#c51b8a",
}
OTHERS = ("#8dd3c7", "#bebada", "#80b1d3", "#fccde5", "#bc80bd", "#ccebc5")


def colours_of(verbs: Iterable[str]) -> dict[str, str]:
    """A colour for each verb, in order of appearance; those without one of their own share a few."""
    unknown = iter(range(10**6))
    own = {v: COLOURS.get(v) or COLOURS.get(v.partition("_")[0]) for v in verbs}   # "encode_dispatch" is an "encode"
    return {v: colour or OTHERS[next(unknown) % len(OTHERS)] for v, colour in own.items()}


def save_png(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Streams as rows, tasks coloured by verb, time with a busy link and idle compute hatched over all rows."""
    from matplotlib.figure import Figure  # half a second, and only this function needs it
    from matplotlib.patches import Patch

    unit, scale = _unit(timeline.makespan)
    figure = Figure(figsize=(min(24.0, 8 + len(timeline.events) / 25), 3.2), layout="constrained")
    axes = figure.subplots()
    colours = colours_of(e.task.verb for e in timeline.events)
    rows = {s: len(STREAMS) - 1 - i for i, s in enumerate(STREAMS)}
    for verb, colour in colours.items():
        for stream, row in rows.items():
            bars = [(e.start * scale, (e.end - e.start) * scale) for e in timeline.events
                    if e.task.verb == verb and stream in e.task.streams]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
    _label(axes, timeline.events, rows, scale, timeline.makespan)
    hatched = [(a * scale, (b - a) * scale) for a, b in timeline.exposed]
    axes.broken_barh(hatched, (-0.5, len(rows)), facecolors="none", edgecolors="#00000030", hatch="///", linewidth=0)
    axes.set(yticks=list(rows.values()), yticklabels=list(rows), xlim=(0, timeline.makespan * scale or 1),
             ylim=(-0.5, len(rows) - 0.5), xlabel=f"{unit} (simulated)", title=title or summary(timeline))
    legend = [Patch(color=c, label=v) for v, c in colours.items()]
    legend.append(Patch(facecolor="none", edgecolor="#00000060", hatch="///", label="exposed communication"))
    figure.legend(handles=legend, loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def trace(timeline: Timeline) -> str:
    """The timeline as Chrome trace JSON: one thread a stream, and one that shows exposed communication."""
    names = (*STREAMS, "exposed")
    events: list[dict] = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}
                          for i, name in enumerate(names)]
    for e in timeline.events:
        facts = {"segment": e.segment, "layer": e.task.layer, "chunk": e.task.chunk, "direction": e.task.direction,
                 "bytes": e.task.bytes, "flops": e.task.flops}
        events += [_slice(e.task.name, e.task.verb, e.start, e.end, STREAMS.index(s)) | {"args": facts}
                   for s in e.task.streams]
    events += [_slice("exposed", "exposed", a, b, len(STREAMS)) for a, b in timeline.exposed]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def summary(timeline: Timeline) -> str:
    """Makespan, bound, exposed communication, each with its unit, in one line."""
    gap = timeline.makespan / timeline.bound_seconds - 1 if timeline.bound_seconds else 0.0
    return (f"{_time(timeline.makespan)}, bound {_time(timeline.bound_seconds)} ({gap:+.1%}), "
            f"exposed communication {_time(timeline.exposed_seconds)}")


def table(timeline: Timeline, max_rows: int = 80) -> str:
    """The summary, each stream's busy time, and tasks by their start with what flies beside them."""
    lines = [summary(timeline)]
    for stream, busy in timeline.busy_seconds.items():
        share = busy / timeline.makespan if timeline.makespan else 0.0
        lines.append(f"{stream:8s}busy {_time(busy):>10s} {share:5.0%}")
    width = max((len(e.task.name) for e in timeline.events), default=4)
    lines.append(f"{'start':>10s} {'takes':>10s}  {'stream':12s} {'task':{width}s}  beside")
    events = sorted(timeline.events, key=lambda e: e.start)
    for e in events[:max_rows]:
        beside = " ".join(o.task.name for o in _beside(e, events)) if e.task.is_collective else ""
        lines.append(f"{_time(e.start):>10s} {_time(e.end - e.start):>10s}  {'+'.join(e.task.streams):12s} "
                     f"{e.task.name:{width}s}  {beside}".rstrip())
    left = len(events) - max_rows
    return "\n".join([*lines, f"... and {left} more tasks"] if left > 0 else lines)


def _beside(event: Event, events: list[Event]) -> list[Event]:
    """Compute tasks that run while the event does."""
    return [o for o in events if not o.task.is_collective and min(o.end, event.end) > max(o.start, event.start)]


def _slice(name: str, category: str, start: float, end: float, thread: int) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": (end - start) * 1e6, "pid": 0,
            "tid": thread}


def _label(axes, events: Iterable[Event], rows: dict[str, int], scale: float, makespan: float) -> None:
    """Chunk numbers on bars that are wide enough."""
    for e in events:
        if e.end - e.start > makespan / 60:
            for stream in e.task.streams:
                axes.text((e.start + e.end) / 2 * scale, rows[stream], str(e.task.chunk), ha="center", va="center",
                          fontsize=6)


def _unit(seconds: float) -> tuple[str, float]:
    return next(((u, s) for u, s in (("seconds", 1.0), ("milliseconds", 1e3)) if seconds * s >= 1),
                ("microseconds", 1e6))


def _time(seconds: float) -> str:
    name, scale = _unit(seconds)
    return f"{seconds * scale:.4g} {dict(seconds='s', milliseconds='ms', microseconds='us')[name]}"
