"""Coded collectives, and train steps of several schedules, between test hosts joined by slow links.

    benchmarks/netlab/netlab 2 100mbit -- python benchmarks/netlab/measure.py collectives
    benchmarks/netlab/netlab 2 400mbit -- python benchmarks/netlab/measure.py steps

Needs root and Debian's iproute2 (see netlab). Every host is a process with two CPU devices on one core. Times are
medians of interleaved runs in the first host's clock, ratios medians of those of one turn; "raw" sends the same 16-bit
words uncoded, in the same tasks. Prints one Markdown table; of steps also how long the sequential plan computes and
sends between hosts, in simulation.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

os.environ["JAX_PLATFORMS"] = "cpu"
import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 2)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxmoe import collectives, load_config  # noqa: E402
from jaxmoe.config import Config  # noqa: E402
from jaxmoe.distributed import initialize  # noqa: E402
from jaxmoe.measure.codec import bench_codec  # noqa: E402
from jaxmoe.measure.modules import with_launch, with_modules  # noqa: E402
from jaxmoe.measure.profile import profile  # noqa: E402
from jaxmoe.measure.timing import times_of  # noqa: E402
from jaxmoe.measure.training import fastest, steppers  # noqa: E402
from jaxmoe.mesh import make_mesh  # noqa: E402
from jaxmoe.plan import codec_policy  # noqa: E402
from jaxmoe.plan.cluster import AlphaBeta, Cluster, Codec, Link, load_cluster  # noqa: E402
from jaxmoe.plan.cost import COLLECTIVES  # noqa: E402
from jaxmoe.plan.plan import Plan  # noqa: E402
from jaxmoe.plan.search import PLANNERS, search  # noqa: E402
from jaxmoe.plan.simulate import simulate  # noqa: E402
from jaxmoe.planning import block_of  # noqa: E402
from jaxmoe.types import ROW_CLASSES, TENSOR_CLASSES  # noqa: E402

CONFIG = Path(__file__).parents[2] / "configs" / "netlab.toml"
FORMATS = ("raw", "x4s", "x3p")
CODED = ("x4s", "x3p")   # what steps are coded with
LINKS: dict = {"node": "inter", "gpu": "intra"}


def ratio(times: list[float], base: list[float]) -> str:
    return f"{median(t / b for t, b in zip(times, base, strict=True)):.2f}"


def collective_rows(mesh, values: int, repeats: int) -> list[list[str]]:
    """Between hosts, on `values` normally distributed bfloat16 values of each device."""
    spec = P(("node", "gpu"))
    shape = (mesh.size * values // 256, 256)
    make = jax.jit(lambda: (0.02 * jax.random.normal(jax.random.key(0), shape)).astype(jnp.bfloat16),
                   out_shardings=NamedSharding(mesh, spec))
    x, rows = make(), []
    for name in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
        calls = {}
        for fmt in FORMATS:
            verb = partial(getattr(collectives, name), axes=("node",), codec=fmt)
            out = P("gpu") if name == "all_reduce" else spec
            mapped = jax.jit(jax.shard_map(lambda x, verb=verb: verb(x), mesh=mesh, in_specs=spec, out_specs=out))
            calls[fmt] = partial(mapped, x)
        times = times_of(calls, repeats)
        rows.append([name, *(f"{median(times[f]):.3f}" for f in FORMATS),
                     *(ratio(times[f], times["raw"]) for f in FORMATS[1:])])
    return rows


def measured_cluster(mesh, repeats: int) -> Cluster:
    """Links, products and memory of the first host. Both devices of a host share a core, so codec rates are halved."""
    found, _ = profile(mesh, {"node": "inter"}, "netlab", (2**18, 2**20, 2**22), (128, 256, 512), repeats)
    codecs = {row["format"]: Codec(origin="measured", ratio=row["ratio"],
                                   encode_bytes_per_second=row["encode_bytes_per_second"] / 2,
                                   decode_bytes_per_second=row["decode_bytes_per_second"] / 2)
              for row in bench_codec(formats=CODED, peers=False, repeats=repeats)}
    inside = AlphaBeta(origin="ours", alpha_seconds=1e-3, seconds_per_byte=1e-9)   # copies: too fast to be fitted
    return found.model_copy(update={
        "codecs": codecs, "intra": Link(**dict.fromkeys(COLLECTIVES, inside)), "links": LINKS})


def config(overrides: tuple[str, ...] = ()) -> Config:
    """CONFIG for as many hosts as there are."""
    return load_config(CONFIG, [f"mesh.axes={{node={os.environ['NETLAB_HOSTS']},gpu=2}}", *overrides])


def fitted(mesh, repeats: int) -> Cluster:
    """The cluster with modules of CONFIG's model, raw and coded."""
    cfg, cluster = config(), measured_cluster(mesh, repeats)
    for kind, degrees in (("raw", (1, 2, 4, 8)), *((codec, (2,)) for codec in CODED)):
        one = cfg.model_copy(update={"codec": cfg.codec.model_copy(update={"kind": kind})})
        cluster, _ = with_modules(one, cluster, repeats, degrees)
        cluster = with_launch(one, cluster, repeats, degrees)   # with one degree, as it was
    return cluster


def plans_of(cfg, cluster: Cluster, mesh, args: argparse.Namespace) -> dict[str, Plan]:
    """Raw plans of several schedules, and coded ones, each class of tensors where that pays; the sequential one in any
    case, for comparison. "measured" is the fastest of so many candidates of the planner's, as `schedule.candidates`
    chooses."""
    block = block_of(cfg, cluster)
    asked = lambda kind: dict(codec_policy.codec_of(  # noqa: E731
        codec_policy.choose(block, cluster, dict.fromkeys(TENSOR_CLASSES, kind))))
    raw, formats = asked("raw"), asked("auto")
    uncoded, coded = (replace(block, codec=tuple(c.items())) for c in (raw, raw | formats))
    found = {name: PLANNERS[name](uncoded, cluster) for name in ("sequential", "pipemoe", "fsmoe")}
    found["sp-moe"] = PLANNERS["sp-moe"](replace(uncoded, chunk="sequence"), cluster)
    found |= planned("auto", uncoded, cfg, cluster, mesh, args)
    forced = formats or dict.fromkeys(ROW_CLASSES, CODED[0])
    named = lambda fmts: ", ".join(f"{tensors} {fmt}" for tensors, fmt in fmts.items())  # noqa: E731
    found[f"sequential, {named(forced)}"] = PLANNERS["sequential"](replace(block, codec=tuple((raw | forced).items())),
                                                                  cluster)
    if formats:
        found |= planned(f"auto, {named(formats)}", coded, cfg, cluster, mesh, args)
    return found


def planned(name: str, block, cfg, cluster: Cluster, mesh, args: argparse.Namespace) -> dict[str, Plan]:
    plans = search(block, cluster).unlike(args.candidates)
    measured = {f"{name}, measured": fastest(cfg, mesh, plans, args.repeats)[0]} if args.candidates > 1 else {}
    return {name: plans[0]} | measured


def kept(path: Path | None, make: Callable[[], Cluster]) -> Cluster:
    """The cluster in the file, or a new one, which is written there by the first host."""
    if path is None:
        return make()
    there = multihost_utils.broadcast_one_to_all(np.asarray(path.exists()))
    cluster = load_cluster(path) if there else make()
    if not there and jax.process_index() == 0:
        path.write_text(cluster.to_toml())
    return cluster


def step_rows(mesh, args: argparse.Namespace) -> list[list[str]]:
    """Train steps of a model that is not the one the cluster is fitted on.

    What a step takes beside its stack (embedding, head, optimizer) is the same for all schedules: the median of what
    their steps take more than predicted.
    """
    cluster = kept(args.cluster, lambda: fitted(mesh, args.repeats))
    cfg = config(tuple(args.model))
    plans = plans_of(cfg, cluster, mesh, args)
    times = times_of(steppers(cfg, mesh, plans), args.repeats)
    timelines = {name: simulate(plan, cluster) for name, plan in plans.items()}
    busy = timelines["sequential"].busy_seconds
    if jax.process_index() == 0:
        print(f"sequential: {busy['compute']:.3f} s of computing, {busy['inter']:.3f} s between hosts\n")
    rest = max(median(median(times[name]) - timelines[name].makespan for name in plans), 0.0)
    rows = []
    for name, plan in plans.items():
        seconds, predicted, bound = median(times[name]), timelines[name].makespan, timelines[name].bound_seconds
        d = plan.degrees
        rows.append([name, f"{d.moe_forward}, {d.moe_backward}", f"{seconds:.3f}", f"{predicted + rest:.3f}",
                     f"{(predicted + rest) / seconds - 1:+.0%}", ratio(times["sequential"], times[name]),
                     f"{bound + rest:.3f}"])
    return rows


HEADS = {
    "collectives": ["collective", *(f"{f}, s" for f in FORMATS), *(f"{f} / raw" for f in FORMATS[1:])],
    "steps": ["schedule", "MoE chunks, forward and backward", "step, s", "predicted, s", "error", "sequential / step",
              "bound, s"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=HEADS)
    parser.add_argument("--values", type=int, default=2**20, help="collectives: values of a device")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", nargs="*", default=["model.layers=2", "moe.d_ff=384", "train.batch=32"],
                        help="steps: overrides of configs/netlab.toml, on which the cluster is fitted")
    parser.add_argument("--cluster", type=Path, help="steps: file of the fitted cluster; written if it is not there")
    parser.add_argument("--candidates", type=int, default=4, help="steps: of auto, measured; 1: none")
    args = parser.parse_args()
    environ = os.environ
    initialize(environ["NETLAB_COORDINATOR"], int(environ["NETLAB_HOSTS"]), int(environ["NETLAB_RANK"]))
    mesh = make_mesh(config())
    rows = collective_rows(mesh, args.values, args.repeats) if args.what == "collectives" else step_rows(mesh, args)
    if jax.process_index() == 0:
        for row in (HEADS[args.what], ["---"] * len(HEADS[args.what]), *rows):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
