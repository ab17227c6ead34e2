"""SM contention on Mast's stand-in grid (ours): MoE layers planned with and without it, all simulated under it.

Only the abstract is known; the model is ours. Links hold c of S streaming multiprocessors (SMs). A collective that
becomes ready while an experts' product runs waits for its end; a product that starts or runs beside a collective slows
by S / (S - c), the collective by γ. Remedies: split each product in 2 or 4 (a launch each, so collectives get in
sooner), or give it a grid of S - c SMs for good (always slower, and no collective waits). FSMoE's order on three
streams, MoE only, forward and backward.

- blind: the degrees that are best without contention.
- degrees: the degrees that are best under contention.
- split: degrees and splits.
- sm-aware: degrees, splits and grids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..plan.simulate import Prepared, Slowdown
from . import fsmoe, grid, mast
from .grid import DEGREES, Grid
from .testbeds import TESTBEDS, Testbed

SMS = {"A": 84, "B": 68}                         # datasheets
LINK_SMS = {"A": (4, 2), "B": (2, 2)}            # (intra, inter): ours, about one an NCCL channel
LINK_SLOWDOWN = 1.1                              # ours
LAUNCH_SECONDS = 2e-5                            # ours
SPLITS = (1, 2, 4)
NOTES = (
    "the abstract gives no speedup; the SMs that links hold, gamma and launches are ours",
    "cases are Mast's stand-in without its repeats over heads, on FSMoE's testbeds",
)


def layers() -> dict[str, np.ndarray]:
    """Mast's stand-in; heads do not matter here."""
    case = mast.layers()
    return {name: column[case["heads"] == 16] for name, column in case.items()}


def contention(testbed: Testbed) -> Slowdown:
    sms, (intra, inter) = SMS[testbed.name], LINK_SMS[testbed.name]
    return Slowdown(sms / (sms - intra), sms / (sms - inter), sms / (sms - intra - inter), LINK_SLOWDOWN, True)


def limited(slow: Slowdown) -> Slowdown:
    """Contention left when products keep off the links' SMs."""
    return Slowdown(link=slow.link)


def split_experts(prepared: Prepared, pieces: int) -> Prepared:
    """The same pass with each experts task cut into pieces, one behind the other."""
    tasks = []
    for task in prepared.tasks:
        if task.verb != "experts":
            tasks.append(task)
            continue
        names = [f"{task.name}.{i}" for i in range(pieces - 1)] + [task.name]
        before = [task.reads[0][:-1], *names]
        tasks += [grid.task(name, "compute", [before[i]], "experts") for i, name in enumerate(names)]
    return grid.prepare(tasks)


def pass_seconds(testbed: Testbed, case: Mapping[str, np.ndarray], backward: bool) -> dict[str, np.ndarray]:
    """System -> seconds of one pass of each MoE layer under contention."""
    slow = contention(testbed)
    ideal, found = [], {}
    for r in DEGREES:
        base, t = fsmoe.moe(r, 3, False), fsmoe.times(testbed, case, r, backward)
        ideal.append(grid.seconds(base, t))
        for pieces in SPLITS:
            experts = t["experts"] / pieces + LAUNCH_SECONDS * (pieces > 1)
            found[r, pieces] = _contended(split_experts(base, pieces), t | {"experts": experts}, slow)
        found[r, 0] = _contended(base, t | {"experts": t["experts"] * slow.beside_both}, limited(slow))
    chosen = np.argmin(ideal, 0)
    return {
        "blind": np.choose(chosen, [found[r, 1] for r in DEGREES]),
        "degrees": np.min([found[r, 1] for r in DEGREES], 0),
        "split": np.min([found[r, pieces] for r in DEGREES for pieces in SPLITS], 0),
        "sm-aware": np.min(list(found.values()), 0),
    }


def run() -> Grid:
    """About 4 seconds on one core."""
    case, speedups = layers(), {}
    for testbed in TESTBEDS:
        forward, backward = (pass_seconds(testbed, case, back) for back in (False, True))
        found = {system: forward[system] + backward[system] for system in forward}
        speedups |= {f"{testbed.name}: {s}": found[s] / found["sm-aware"] for s in ("blind", "degrees", "split")}
    return Grid("sm-aware", len(TESTBEDS) * len(case["batch"]), speedups, {}, NOTES)


def _contended(prepared: Prepared, times: Mapping[str, np.ndarray], slow: Slowdown) -> np.ndarray:
    columns = {t.name: times[t.verb].tolist() for t in prepared.tasks}
    count = len(next(iter(columns.values())))
    return np.array([prepared.makespan({n: c[i] for n, c in columns.items()}, slow) for i in range(count)])
