"""Modelled times of all schedules for one model, and the timeline of one segment of each, as PNG.

    python benchmarks/schedules.py [CONFIG] [--out docs/schedules] [--section.key=value ...]

Timelines are drawn with four chunks, so that they can be read; times are at each schedule's best degrees.
"""

import argparse
import sys
from pathlib import Path

import jax

from jaxmoe.cli.common import overrides
from jaxmoe.config import load_config
from jaxmoe.plan import draw
from jaxmoe.plan.cluster import Cluster, load_cluster
from jaxmoe.plan.plan import Plan
from jaxmoe.plan.simulate import simulate
from jaxmoe.plan.tasks import Degrees
from jaxmoe.planning import PLANNERS, block_of

DRAWN = 4


def row(kind: str, found: Plan, cluster: Cluster) -> str:
    t, layers, d = simulate(found, cluster), found.block.layers, found.degrees
    cut = f"{d.moe_forward} forward, {d.moe_backward} backward; {d.dense_forward}, {d.dense_backward}"
    return (f"| `{kind}` | {found.block.layout} | {found.block.chunk} | {cut} | {t.makespan / layers * 1e3:.2f} | "
            f"{t.exposed_seconds / layers * 1e3:.2f} | {t.makespan / t.bound_seconds - 1:.1%} |")


def main(path: str, out: Path, options: list[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    cfg = load_config(path, overrides(options))
    cluster = load_cluster(cfg.schedule.cluster)
    block = block_of(cfg, cluster)
    out.mkdir(parents=True, exist_ok=True)
    print("| schedule | rows | cut along | chunks of MoE, of the rest | ms a layer | exposed ms | above its bound |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind, planner in PLANNERS.items():
        try:
            found = planner(block, cluster)
        except ValueError as e:
            print(f"`{kind}`: {e}", file=sys.stderr)
            continue
        print(row(kind, found, cluster))
        dense = 1 if found.block.chunk == "slots" else DRAWN
        shown = found if kind == "sequential" else planner(block, cluster, Degrees(DRAWN, DRAWN, dense, dense))
        timeline = simulate(shown, cluster, shown.block.segment)
        draw.save_png(timeline, out / f"{kind}.png", f"{kind}: {draw.summary(timeline)} (modelled)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    default = Path(__file__).parent.parent / "configs/mixtral-8x7b-8x8-h100.toml"
    parser.add_argument("config", nargs="?", default=default)
    parser.add_argument("--out", type=Path, default=Path("docs/schedules"))
    given, options = parser.parse_known_args()
    main(given.config, given.out, options)
