"""Published grids of layers, simulated with published constants. Every figure here is modelled, none is measured."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from .grid import as_text as as_text
from .grid import plot as _plot

NAMES = ("fsmoe", "parm", "mast", "sp-moe", "sm-aware", "zipccl")


def reproduce(name: str, plot: str | Path | None = None) -> dict[str, Any]:
    """Simulate the grid of a paper: cases, mean_speedup and min_speedup ("testbed: baseline" -> ratio), paper, notes.

    plot: where to save a picture of the distributions. Raises ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"reproduce knows {', '.join(NAMES)}, got {name!r}")
    grid = import_module(f".{name.replace('-', '_')}", __name__).run()
    if plot:
        _plot(grid, plot)
    return grid.summary()
