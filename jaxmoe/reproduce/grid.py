"""What every reproduction shares: chunked passes, grids of cases, and the result."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..plan.simulate import Prepared
from ..plan.tasks import Pass, Task

DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Grid:
    """speedups: "testbed: baseline" -> one ratio a case, baseline's seconds over the system's. paper: the same keys,
    published means, or (lowest, highest). notes: what differs from the paper. facts: other figures. cases: how many."""

    name: str
    cases: int
    speedups: Mapping[str, np.ndarray]
    paper: Mapping[str, float | tuple[float, float]]
    notes: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name, "modelled": True, "cases": self.cases,
            "mean_speedup": {k: float(np.mean(v)) for k, v in self.speedups.items()},
            "median_speedup": {k: float(np.median(v)) for k, v in self.speedups.items()},
            "min_speedup": {k: float(np.min(v)) for k, v in self.speedups.items()},
            "paper": dict(self.paper), **self.facts, "notes": list(self.notes),
        }


def cases(**factors: Sequence[Any]) -> dict[str, np.ndarray]:
    """The full grid of these factors: name -> its value in each case."""
    rows = list(itertools.product(*factors.values()))
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(factors)}


def task(name: str, stream: str, after: Iterable[str] = (), verb: str = "") -> Task:
    """A task that reads the results of others."""
    return Task(name, verb or name.partition(".")[0], (stream,), tuple(f"{a}!" for a in after), (f"{name}!",))


def prepare(tasks: Sequence[Task], order: Sequence[str] = ()) -> Prepared:
    """Tasks as a pass, issued in this order, or as listed."""
    return Prepared(Pass(tuple(tasks)), tuple(order) or tuple(t.name for t in tasks))


def seconds(prepared: Prepared, times: Mapping[str, Any], efficiency: float = 1.0) -> np.ndarray:
    """Makespans of all cases. times: verb -> seconds of each of its tasks, one a case."""
    return prepared.makespans({t.name: np.asarray(times[t.verb]) for t in prepared.tasks}, efficiency)


def as_text(result: Mapping[str, Any]) -> str:
    """The summary of a grid as a table, the paper's figures beside ours."""
    width = max(map(len, result["mean_speedup"]))
    lines = [f"{result['name']}: {result['cases']} cases, modelled; speedup over",
             f"{'':{width}s}    mean  median     min  paper"]
    for key, mean in result["mean_speedup"].items():
        paper = "  " + " to ".join(f"{v:.2f}" for v in _ends(result["paper"].get(key, ())))
        median, least = result["median_speedup"][key], result["min_speedup"][key]
        lines.append(f"{key:{width}s}{mean:8.3f}{median:8.3f}{least:8.3f}{paper}".rstrip())
    return "\n".join([*lines, *(f"- {note}" for note in result["notes"])])


def _ends(value: float | tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def plot(grid: Grid, path: str | Path) -> None:
    """Distributions of the speedups, the paper's figures as dashed lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 + 0.45 * len(grid.speedups)), layout="constrained")
    axes = figure.subplots()
    keys = list(grid.speedups)[::-1]
    axes.boxplot([grid.speedups[k] for k in keys], orientation="horizontal", widths=0.6, whis=(1, 99), sym="",
                 tick_labels=keys)
    for row, key in enumerate(keys, 1):
        for value in _ends(grid.paper.get(key, ())):
            axes.plot([value] * 2, [row - 0.35, row + 0.35], "r--", label="paper")
    axes.axvline(1, color="grey", linewidth=0.6)
    axes.set(xlabel="speedup (modelled; box: quartiles, whiskers: 1 % and 99 %)", title=grid.name)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[:1], labels[:1], loc="lower right")
    figure.savefig(path, dpi=150)
