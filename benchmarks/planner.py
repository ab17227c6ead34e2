"""Seconds of planning: one layer, and stacks of them; and a layer of each published grid, without its ties.

    python benchmarks/planner.py [CONFIG] [--section.key=value ...]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import jax
import numpy as np

from jaxmoe.cli.common import overrides
from jaxmoe.config import load_config
from jaxmoe.plan.block import Block
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.schedules.base import Bench
from jaxmoe.plan.search import search, singles
from jaxmoe.planning import block_of
from jaxmoe.reproduce import auto
from jaxmoe.reproduce.testbeds import TESTBEDS

GRIDS = ("fsmoe", "mast", "sp-moe", "parm")


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def row(what: str, seconds: Sequence[float]) -> None:
    print(f"{what:28s} {median(seconds):8.3f} {max(seconds):8.3f}")


def main(path: str, options: list[str], sample: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    cfg = load_config(path, overrides(options))
    cluster = load_cluster(cfg.schedule.cluster)
    given = block_of(cfg, cluster)
    print(f"{'CPU seconds of planning':28s} {'median':>8s} {'longest':>8s}")
    for layers in (1, 2, 32):
        stack = replace(given, layers=layers, segment=1)
        row(f"{layers} layers, tied", [cpu_seconds(lambda s=stack: search(s, cluster, memory_bytes=float("inf")))])
    for name in GRIDS:
        for testbed in TESTBEDS:
            cases = auto.blocks(name, testbed)
            chosen = [cases[i] for i in np.random.default_rng(0).choice(len(cases), sample, replace=False)]
            for what, call in (("a layer", layer), ("all steps", auto.ladder)):
                row(f"{name} {testbed.name}, {what}", [cpu_seconds(partial(call, testbed.name, c)) for c in chosen])


def layer(testbed: str, given: Block) -> None:
    """What one step of the ladder takes: all schedules and the planner, under contention."""
    bench = Bench(auto.cluster(testbed))
    auto.under_contention(given, bench, singles(given, bench).values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    default = Path(__file__).parent.parent / "configs/mixtral-8x7b-8x8-h100.toml"
    parser.add_argument("config", nargs="?", default=default)
    parser.add_argument("--sample", type=int, default=5, help="cases of each grid")
    given, options = parser.parse_known_args()
    main(given.config, options, given.sample)
