"""plan, simulate and prove."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import FREE, Json, app, overrides, pin_cpu_without_gpu

Config = Annotated[Path, typer.Argument(help="TOML file.")]
ClusterFile = Annotated[str | None, typer.Option(help="Cluster file, or the name of a shipped one; by default the "
                                                      "config's schedule.cluster.")]
Timeline = Annotated[Path | None, typer.Option(help="PNG of the timeline.")]
Trace = Annotated[Path | None, typer.Option(help="Trace for Perfetto (ui.perfetto.dev), JSON.")]


@app.command(context_settings=FREE)
def plan(
    context: typer.Context, config: Config, cluster: ClusterFile = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the plan, JSON.")] = None,
    timeline: Timeline = None, trace: Trace = None, as_json: Json = False,
) -> None:
    """Choose and show the plan of CONFIG's train step on a cluster. Times are modelled."""
    from ..config import load_config

    cfg = load_config(config, overrides(context.args))
    pin_cpu_without_gpu()
    from ..plan.codec_policy import as_planned
    from ..planning import codec_choices, compare, memory_of
    from ..roles import mappings

    costs = _cluster(cfg, cluster)
    tried = mappings(cfg, costs) if cfg.parallel.kind == "auto" else []
    cfg = tried[0].cfg if tried else cfg
    chosen, others = compare(cfg, costs)
    if out is not None:
        out.write_text(chosen.to_json())
    facts = _facts(chosen, costs, memory_of(cfg, chosen)) | {
        "alternatives": others,
        "codec_choices": [dataclasses.asdict(c) for c in as_planned(codec_choices(cfg, costs), chosen.block)],
        "roles": [{"parallel": m.cfg.parallel.model_dump(), "text": m.text, "seconds": m.seconds} for m in tried],
    }
    _show(facts, chosen, costs, timeline, trace, as_json)


@app.command()
def simulate(
    plan: Annotated[Path, typer.Option(help="A plan that `jaxmoe plan --out` wrote.")],
    cluster: Annotated[str, typer.Option(help="Cluster file, or the name of a shipped one.")],
    timeline: Timeline = None, trace: Trace = None, as_json: Json = False,
) -> None:
    """Simulate a saved plan on a cluster. Times are modelled."""
    from ..plan.cluster import load_cluster
    from ..plan.plan import Plan
    from ..plan.search import plan_memory

    found, costs = Plan.from_json(_read(plan)), load_cluster(cluster)
    _show(_facts(found, costs, plan_memory(found)), found, costs, timeline, trace, as_json)


@app.command(context_settings=FREE)
def prove(
    context: typer.Context, config: Config, cluster: ClusterFile = None,
    plan: Annotated[Path | None, typer.Option(help="A saved plan; by default the config's.")] = None,
    as_json: Json = False,
) -> None:
    """Compile CONFIG's train step for a cluster's GPUs, which need not be here, and compare it with its plan.

    Exit status 1 when an overlap that the plan promises is missing.
    """
    from ..config import load_config

    cfg = load_config(config, overrides(context.args))
    pin_cpu_without_gpu()
    from ..plan.plan import Plan
    from ..proof import prove as proven
    from ..roles import choose_roles

    costs = _cluster(cfg, cluster)
    report = proven(choose_roles(cfg, costs), costs, None if plan is None else Plan.from_json(_read(plan)))
    print(json.dumps(report.to_dict()) if as_json else report.text)
    if not report.holds:
        raise typer.Exit(1)


def _cluster(cfg: Any, given: str | None) -> Any:
    from ..plan.cluster import load_cluster

    return load_cluster(given or cfg.schedule.cluster)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise ValueError(f"plan {str(path)!r} cannot be read: {e.strerror}") from e


def _show(facts: dict[str, Any], plan: Any, cluster: Any, png: Path | None, trace: Path | None, as_json: bool) -> None:
    """Draws a plan's segment where asked for, and prints what is known of it."""
    from ..plan import draw
    from ..plan.search import explain
    from ..plan.simulate import simulate as run

    segment = run(plan, cluster, plan.block.segment)
    if png is not None:
        draw.save_png(segment, png, f"{plan.schedule} on {cluster.name} (modelled)")
    if trace is not None:
        trace.write_text(draw.trace(segment))
    if as_json:
        print(json.dumps(facts))
    else:
        print("\n".join([draw.table(segment), _times(facts, plan), _memory(facts, plan), explain(plan, cluster),
                         *_choices(facts)]))


def _facts(plan: Any, cluster: Any, memory: Any) -> dict[str, Any]:
    """What `--json` prints of any plan. Seconds are modelled, bytes estimated."""
    from ..plan.simulate import simulate as run

    whole = run(plan, cluster)
    return {
        "schedule": plan.schedule, "degrees": dataclasses.asdict(plan.degrees), "cluster": cluster.name,
        "predicted_seconds": whole.makespan, "layer_seconds": whole.makespan / plan.block.layers,
        "bound_seconds": whole.bound_seconds, "exposed_communication_seconds": whole.exposed_seconds,
        "memory_bytes": memory._asdict() | {"total": memory.total, "device": cluster.device.memory_bytes},
        "alternatives": {}, "codec": dict(plan.block.codec), "codec_choices": [], "roles": [],
    }


def _times(facts: dict[str, Any], plan: Any) -> str:
    return (f"{plan.schedule}, degrees {facts['degrees']}: the stack of {plan.block.layers} layers takes "
            f"{facts['predicted_seconds'] * 1e3:.2f} ms forward and backward (modelled; bound "
            f"{facts['bound_seconds'] * 1e3:.2f} ms, exposed communication "
            f"{facts['exposed_communication_seconds'] * 1e3:.2f} ms)")


def _memory(facts: dict[str, Any], plan: Any) -> str:
    from ..plan.memory import Memory

    memory, device = Memory(*(facts["memory_bytes"][f] for f in Memory._fields)), facts["memory_bytes"]["device"]
    over = "" if memory.total <= device else ", which is too much"
    return (f"memory of a device, estimated: {memory} of {device / 1e9:.2f} GB{over}; saved for the backward pass: "
            f"{', '.join(plan.saved)}")


def _choices(facts: dict[str, Any]) -> list[str]:
    """Lines on what was chosen, and what else there was."""
    lines = []
    for c in facts["codec_choices"]:
        times = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in c["seconds"].items())
        lines.append(f"  codec of {c['tensors']}: {c['codec'] or 'off'} ({c['why']}; {c['bytes']:.3g} bytes, {times})")
    lines += [f"  {m['seconds'] * 1e3:10.2f} ms with {m['text']}" for m in facts["roles"]]
    return lines + [f"  {name:14s} {seconds * 1e3:10.2f} ms"
                    for name, seconds in sorted(facts["alternatives"].items(), key=lambda item: item[1])]
