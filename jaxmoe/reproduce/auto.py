"""The planner ("auto") on the grids of the other reproductions, against the best single schedule of each case (ours).

A case is a layer in the middle of a stack, as the library's own task graph has it (attention, MoE, statistics of the
routing, dense gradients of the layer above), with the costs of `configs/clusters/fsmoe-{a,b}.toml`. What flies beside
what is not tied: that is for XLA. Best single: the fastest of all schedules of `jaxmoe.plan.schedules`, each with its
own degrees, slices and orders, planned blind to contention, Mast as built there (not reproduce/mast.py) included. The
planner's ladder, each step with all before it:

- order: other degrees, any pass's order and its descent, at the best single's cut and slices.
- layout: any cut, two layers together, one All-to-All over all parts of experts.
- slices: any number of slices of gradients.
- contention: planned with contention in the model; it and the best single (blind) are simulated under it.
- codec: the same with values of two bytes, on both sides, at the cut that is best with four, and tensors coded where
  that is faster. Rates are ours.

`planned_with_contention`: seconds under contention of the plan made without it over those of the plan made with it,
which is never slower, as it may be the same.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ..plan.block import Block, Param
from ..plan.cluster import Cluster, Codec, load_cluster
from ..plan.codec_policy import choose, codec_of
from ..plan.schedules.base import Bench, all_degrees
from ..plan.search import Combination, Space, combined, finished, singles
from ..plan.simulate import slowdown
from ..types import TENSOR_CLASSES
from . import fsmoe, mast, parm, sp_moe
from .grid import Grid
from .testbeds import TESTBEDS, Testbed

LAYERS = 4
STEPS = ("order", "layout", "slices", "contention", "codec")
OTHERS = ("mast", "sp-moe")
ENCODE, DECODE = 1 / 3, 2 / 3     # of the memory's rate: as assumed of an H100 (ours)
RATIO = 1.3                       # of x4s; x3p is not tried
FEW = 64                          # cases for which no processes are started
NOTES = (
    "best single, planner and costs are ours throughout; constants of links and products are FSMoE's testbeds'",
    "planned and simulated without contention unless it says contention or codec; single schedules plan without it",
    "mast, sp-moe: as built in jaxmoe.plan.schedules, alone; sp-moe is there where tokens are not dropped (its grid)",
    "codec: rates are ours, a third and two thirds of the memory's; values have two bytes with and without it",
    "cases that differ in heads only are equal here, and planned once",
)


def blocks(name: str, testbed: Testbed) -> list[Block]:
    """The grid's cases, in order."""
    case = {"fsmoe": lambda: fsmoe.layers(testbed), "mast": mast.layers, "sp-moe": sp_moe.layers,
            "parm": parm.layers}[name]()
    rows = [dict(zip(case, row, strict=True)) for row in zip(*case.values(), strict=True)]
    return [block(testbed, row, by_token=name == "sp-moe") for row in rows]


def block(testbed: Testbed, case: Mapping[str, Any], by_token: bool) -> Block:
    """One expert a node, split over n_ESP GPUs of it; n_MP GPUs share sequences; the rest of a node repeats them."""
    sizes = _axes(testbed.gpus_per_node, sorted({int(case.get(n, testbed.gpus_per_node)) for n in ("n_mp", "n_esp")}))
    over = {n: _first(sizes, int(case.get(n, testbed.gpus_per_node))) for n in ("n_mp", "n_esp")}
    axes = (("node", testbed.nodes), *sizes.items())
    width, n_mp, n_esp = int(case["width"]), _product(sizes, over["n_mp"]), _product(sizes, over["n_esp"])
    hidden, gated = int(width * case["ratio"]), case.get("activation") == "swiglu"
    batch, seq = int(case["batch"]), int(case["length"]) // n_mp
    rows = case.get("capacity", case.get("k", 1) * case.get("factor", 1)) * batch * seq / testbed.nodes
    rest = {n: ("node", *(a for a in sizes if a not in used)) for n, used in over.items()}
    dense = [Param(n, "attention", (width, width // n_mp), reduce=rest["n_mp"]) for n in ("w_q", "w_k", "w_v", "w_o")]
    experts = [Param(n, "experts", (1, hidden // n_esp, width), reduce=rest["n_esp"][1:])
               for n in ("w_up_EFD", *(["w_gate_EFD"] * gated), "w_down_EFD")]
    return Block(
        batch, seq, width, hidden, testbed.nodes, 1, round(rows), by_token=by_token, gated=gated, attention=True,
        head_dim=width, layers=LAYERS, axes=axes, links=(("node", "inter"), *((a, "intra") for a in sizes)),
        roles=(("data", rest["n_mp"]), ("expert", ("node",)), ("expert_shard", over["n_esp"]), ("model", over["n_mp"])),
        params=(*dense, *experts))


def _axes(gpus: int, groups: Sequence[int]) -> dict[str, int]:
    """Axes inside a node, of which the first ones make up a group of each size."""
    found, size = {}, 1
    for group in (*groups, gpus):
        if group > size:
            found[f"gpu{len(found)}"], size = group // size, group
    return found


def _first(sizes: Mapping[str, int], group: int) -> tuple[str, ...]:
    found: list[str] = []
    for axis in sizes:
        if _product(sizes, found) < group:
            found.append(axis)
    return tuple(found)


def _product(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    return int(np.prod([sizes[a] for a in axes]))


@cache
def cluster(testbed: str) -> Cluster:
    """The testbed's, with a codec (ours)."""
    found = load_cluster(f"fsmoe-{testbed.lower()}")
    rate = found.memory.bytes_per_second
    codec = Codec(origin="ours", encode_bytes_per_second=ENCODE * rate, decode_bytes_per_second=DECODE * rate,
                  ratio=RATIO)
    return found.model_copy(update={"codecs": {"x4s": codec}})


def ladder(testbed: str, given: Block) -> dict[str, float]:
    """Step -> how many times as fast as the best single schedule; and how much faster than others, see the module."""
    costs = cluster(testbed)
    bench, slow = Bench(costs), slowdown(costs)
    alone = singles(given, bench)
    first = _fastest(alone.values())
    same = Space(slices=(first.choice.slices,))
    own = combined(bench.trials(first.trials.block), all_degrees(first.trials.block), same, np.inf)
    plans = [_fastest([first, *([own.refined()] if own else [])])]
    for space in (same, Space()):
        plans.append(_fastest([plans[-1], *finished(given, bench, None, space, plans[-1].layer_seconds)]))
    found = {step: first.layer_seconds / p.layer_seconds for step, p in zip(STEPS, plans, strict=False)}
    found |= {name: alone[name].layer_seconds / plans[-1].layer_seconds for name in OTHERS if name in alone}
    blind = plans[-1].under(slow)
    single, aware = under_contention(given, bench, alone.values(), [blind])
    found |= {"contention": single.layer_seconds / aware.layer_seconds,
              "planned with contention": blind.layer_seconds / aware.layer_seconds,
              "gap": plans[-1].gap, "codec": coded_speedup(given, aware.trials.block, costs)}
    return found


def under_contention(given: Block, bench: Bench, alone: Iterable[Combination],
                     known: Iterable[Combination] = ()) -> tuple[Combination, Combination]:
    """The best single schedule and the planner's choice, which may be one of `known`."""
    slow = slowdown(bench.cluster)
    single = _fastest([c.under(slow) for c in alone])
    return single, _fastest([single, *known, *finished(given, bench, slow, Space(), single.layer_seconds)])


def coded_speedup(given: Block, cut: Block, costs: Cluster) -> float:
    """Of the planner at one cut of the block, with values of two bytes, over the best single schedule with such."""
    slow, space = slowdown(costs), Space()
    bench = Bench(costs)
    single = _fastest([c.under(slow) for c in singles(replace(given, bytes_per_value=2), bench).values()])
    best, plain = single, replace(cut, bytes_per_value=2)
    coded = replace(plain, codec=codec_of(choose(plain, costs, dict.fromkeys(TENSOR_CLASSES, "auto"))))
    for block in dict.fromkeys((plain, coded)):
        found = combined(bench.trials(block, slow), all_degrees(block), space, best.layer_seconds * block.segment)
        best = _fastest([best, *([found.refined()] if found else [])])
    return single.layer_seconds / best.layer_seconds


def _fastest(found: Iterable[Combination]) -> Combination:
    return min(found, key=lambda c: c.layer_seconds)


def run(sample: int | None = None) -> Grid:
    """sample: cases of each grid, drawn with a fixed seed; None = all, in some minutes on two cores."""
    speedups, facts, count = {}, {"mean_gap_to_bound": {}, "planned_with_contention": {}}, 0
    work = {(name, t.name): _drawn(blocks(name, t), sample) for name in ("fsmoe", "mast", "sp-moe", "parm")
            for t in TESTBEDS}
    unique = {(testbed, b): None for (_, testbed), cases in work.items() for b in cases}
    known = dict(zip(unique, _ladders(list(unique)), strict=True))
    for (name, testbed), cases in work.items():
        rows, key = [known[testbed, b] for b in cases], f"{name} {testbed}"
        columns = {k: np.array([r[k] for r in rows]) for k in rows[0]}
        count += len(cases)
        speedups |= {f"{key}, {step}: best single": columns[step] for step in STEPS}
        speedups |= {f"{key}: {other}": columns[other] for other in OTHERS if other in columns}
        facts["mean_gap_to_bound"][key] = float(np.mean(columns["gap"]))
        ratio = columns["planned with contention"]
        facts["planned_with_contention"][key] = {"mean": float(np.mean(ratio)), "min": float(np.min(ratio))}
    return Grid("auto", count, speedups, {}, NOTES, facts)


def _drawn(cases: list[Block], sample: int | None) -> list[Block]:
    if sample is None or sample >= len(cases):
        return cases
    return [cases[i] for i in sorted(np.random.default_rng(0).choice(len(cases), sample, replace=False))]


def _ladders(work: Sequence[tuple[str, Block]]) -> list[dict[str, float]]:
    """On all cores, if there is much to do."""
    call: Callable[..., dict[str, float]] = ladder
    if len(work) <= FEW:
        return [call(*w) for w in work]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, _on_cpu) as pool:
        return list(pool.map(call, *zip(*work, strict=True), chunksize=8))


def _on_cpu() -> None:
    """For a process that is to leave GPUs alone."""
    os.environ["JAX_PLATFORMS"] = "cpu"
