"""Published grids of layers, simulated with published constants. Every figure here is modelled, none is measured."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from .grid import as_text as as_text
from .grid import plot as _plot

NAMES = ("fsmoe", "parm", "mast", "sp-moe", "sm-aware", "zipccl", "auto")
SAMPLED = ("auto",)   # their grids are long


def reproduce(name: str, plot: str | Path | None = None, sample: int | None = None) -> dict[str, Any]:
    """Simulate the grid of a paper: cases, mean_speedup, median_speedup and min_speedup ("testbed: baseline" -> ratio),
    paper, notes. "auto": the planner on those grids.

    plot: where to save a picture of the distributions. sample: cases of each grid to take, of "auto"; the same ones
    each time. Raises ValueError for an unknown name, or a sample of something else.
    """
    if name not in NAMES:
        raise ValueError(f"reproduce knows {', '.join(NAMES)}, got {name!r}")
    if sample is not None and (name not in SAMPLED or sample < 1):
        raise ValueError(f"sample must be a positive number, of {', '.join(SAMPLED)} only, got {sample} for {name!r}")
    grid = import_module(f".{name.replace('-', '_')}", __name__).run(*([] if sample is None else [sample]))
    if plot:
        _plot(grid, plot)
    return grid.summary()
