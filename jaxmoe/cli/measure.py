"""bench, profile, reproduce and doctor."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .common import FREE, Json, app, overrides, pin_cpu_without_gpu, prepare_devices


@app.command(context_settings=FREE)
def bench(
    context: typer.Context,
    what: Annotated[Literal["layer", "codec", "train"], typer.Argument(help="What to measure.")],
    config: Annotated[Path | None, typer.Argument(help="train: TOML file; any of its keys is an option.")] = None,
    shape: Annotated[Literal["a", "b"], typer.Option(help="layer: 8 experts, top-2, or 32 narrow ones, top-4.")] = "a",
    devices: Annotated[int, typer.Option(min=1, help="layer: simulated devices, where there is no GPU.")] = 8,
    schedules: Annotated[str, typer.Option(help="train: schedules, with commas.")] = "plain,sequential,pipemoe",
    peers: Annotated[bool, typer.Option(help="codec: ZipNN and zstd beside it, where installed.")] = True,
    repeats: Annotated[int, typer.Option(min=1)] = 7, as_json: Json = False,
) -> None:
    """Measure on the present devices: the MoE layer beside its bound, the codec beside its peers, a config's train step
    under several schedules."""
    from ..config import ConfigError

    if what != "train" and (config is not None or context.args):
        given = " ".join(map(str, (*([config] if config else []), *context.args)))
        raise ConfigError(f"bench {what} takes no CONFIG and no config keys, got {given}")
    measures = {
        "layer": lambda: _layer_rows(shape, devices, repeats), "codec": lambda: _codec_rows(peers, repeats),
        "train": lambda: _train_rows(config, overrides(context.args), schedules, repeats),
    }
    rows = measures[what]()
    print(json.dumps({"rows": rows}) if as_json else rows_as_text(rows))


def _layer_rows(shape: str, devices: int, repeats: int) -> list[dict[str, Any]]:
    import jax

    if pin_cpu_without_gpu():
        jax.config.update("jax_num_cpu_devices", devices)
    from ..measure.layer import SHAPES, bench_layer

    return bench_layer(SHAPES[shape], repeats=repeats)


def _train_rows(config: Path | None, options: list[str], schedules: str, repeats: int) -> list[dict[str, Any]]:
    from ..config import ConfigError, load_config

    if config is None:
        raise ConfigError("bench train needs CONFIG, a TOML file")
    cfg = load_config(config, options)
    prepare_devices(cfg)
    from ..measure.training import bench_train
    from ..roles import choose_roles

    return bench_train(choose_roles(cfg), schedules.split(","), repeats)


def _codec_rows(peers: bool, repeats: int) -> list[dict[str, Any]]:
    pin_cpu_without_gpu()
    from ..measure.codec import bench_codec

    return bench_codec(peers=peers, repeats=repeats)


def rows_as_text(rows: list[dict[str, Any]]) -> str:
    """A table with a column for each key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    shown = [[_short(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(c), *(len(r[i]) for r in shown)) for i, c in enumerate(columns)]
    lines = [columns, *shown]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _short(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@app.command(context_settings=FREE)
def profile(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Cluster file to write.")],
    axes: Annotated[str, typer.Option(help="Mesh axes and their links: name=size:link, several with commas.")] = "",
    devices: Annotated[int, typer.Option(min=1, help="Simulated devices, where there is no GPU.")] = 8,
    name: Annotated[str, typer.Option(help="Name of the cluster.")] = "measured",
    config: Annotated[Path | None, typer.Option(help="A model whose planned tasks are measured as well; "
                                                         "any of its keys is an option.")] = None,
    as_json: Json = False,
) -> None:
    """Measure collectives, matrix products and copies on the present devices, and how much longer they take beside each
    other; fit α and β; write a cluster file."""
    import jax

    if pin_cpu_without_gpu():
        jax.config.update("jax_num_cpu_devices", devices)
    from ..measure.profile import as_text, axes_of
    from ..measure.profile import profile as measured

    mesh, links = axes_of(axes)
    cluster, fits = measured(mesh, links, name)
    if config is not None:
        from ..config import load_config
        from ..measure.modules import with_launch, with_modules
        from ..roles import choose_roles

        cfg = choose_roles(load_config(config, overrides(context.args)), cluster)
        cluster, found = with_modules(cfg, cluster)
        fits, cluster = [*fits, *found], with_launch(cfg, cluster)
    out.write_text(cluster.to_toml())
    slower = cluster.contention.compute_slowdown if cluster.contention else None
    launch = cluster.device.launch_seconds
    found = {"out": str(out), "fits": [dataclasses.asdict(f) for f in fits], "slower_together": slower,
             "launch_seconds": launch}
    beside = f"a product and an All-to-All take {slower:.2f} times as long beside each other\n" if slower else ""
    every = f"every task takes {launch:.2e} s beyond its own work\n" if launch else ""
    print(json.dumps(found) if as_json else f"{as_text(fits)}\n{beside}{every}written to {out}")


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="fsmoe, parm, mast, sp-moe, sm-aware, zipccl, or auto: the "
                                            "planner on these papers' grids.")],
    plot: Annotated[Path | None, typer.Option(help="PNG of the distributions of speedups.")] = None,
    sample: Annotated[int | None, typer.Option(help="Cases of each grid, of auto; by default all.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate the grid of a paper, or its labelled stand-in, with published constants. All figures are modelled."""
    from ..reproduce import as_text
    from ..reproduce import reproduce as run

    pin_cpu_without_gpu()
    found = run(name, plot, sample)
    print(json.dumps(found) if as_json else as_text(found))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions and devices, and what is missing for what."""
    import jax

    pin_cpu_without_gpu()
    wanted = {"tokenizers": "train.data.tokenizer",
              "safetensors": "Hugging Face checkpoints, pip install 'jaxmoe[hf]'",
              "jax_cuda13_plugin": "jaxmoe prove, pip install 'jaxmoe[prove]'"}
    problems = [f"{name} is missing: needed for {use}" for name, use in wanted.items()
                if importlib.util.find_spec(name) is None]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    found = {"versions": versions, "devices": [str(d) for d in jax.devices()], "problems": problems}
    if as_json:
        print(json.dumps(found))
        return
    for name, value in (versions | {"devices": ", ".join(found["devices"])}).items():
        print(f"{name:8s} {value}")
    print("\n".join(problems) or "no problems")
