"""The command line. Bad input ends with one line on stderr and exit status 2."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train Mixture-of-Experts transformers in JAX.")
FREE = {"ignore_unknown_options": True, "allow_extra_args": True}
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main() -> None:
    """Entry point of `jaxmoe`."""
    warnings.showwarning = _show_warning
    try:
        app()
    except (ValueError, FileNotFoundError) as e:
        print(f"jaxmoe: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:   # the loop has saved, and said how to go on
        sys.exit(130)
    except RuntimeError as e:
        print(f"jaxmoe: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(1)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Our warnings in one line on stderr; those of libraries as they are."""
    if category is UserWarning and "jaxmoe" in filename:
        print(f"jaxmoe: warning: {message}", file=sys.stderr)
    else:
        print(warnings.formatwarning(message, category, filename, lineno, line), file=sys.stderr, end="")


@app.command(context_settings=FREE)
def train(
    context: typer.Context, config: Annotated[Path, typer.Argument(help="TOML file.")],
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False, as_json: Json = False,
    devices: Annotated[int | None, typer.Option(
        min=1, help="Simulated CPU devices of this process, where there is no GPU.")] = None,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, in a multi-process run.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="Processes of the run; SLURM's by itself.")] = None,
    process_id: Annotated[int | None, typer.Option(min=0, help="Which of them this is, from 0.")] = None,
) -> None:
    """Train CONFIG. Any key is an option: --moe.router.k=4."""
    from .config import load_config
    from .distributed import initialize, process_count, stdout_to_stderr

    cfg = load_config(config, overrides(context.args))
    prepare_devices(cfg, devices, process_count(num_processes))
    initialize(coordinator, num_processes, process_id)
    import jax

    from .training.loop import train as run

    with stdout_to_stderr():   # Gloo prints whenever it connects
        result = run(cfg, resume=resume, quiet=as_json)
    if jax.process_index():
        return
    if as_json:
        print(json.dumps(result))
        return
    print(f"held-out loss {result['eval_loss']:.4f} nats per token after {result['steps']} steps")
    print(f"loss plot: {result['plot']}\nsample:\n{result['sample']}")


@app.command(context_settings=FREE)
def describe(
    context: typer.Context, config: Annotated[Path, typer.Argument(help="TOML file.")], as_json: Json = False,
) -> None:
    """Show the parameters of CONFIG, how they are sharded, bytes per device and FLOPs, allocating nothing."""
    from .config import load_config

    cfg = load_config(config, overrides(context.args))
    pin_cpu_without_gpu()
    from .training.describe import as_text
    from .training.describe import describe as found_in

    found = found_in(cfg)
    print(json.dumps(found) if as_json else as_text(found))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    tokens: Annotated[int, typer.Option(min=1)] = 200, temperature: Annotated[float, typer.Option(min=0)] = 0.8,
    seed: int = 0, as_json: Json = False,
) -> None:
    """Sample from the last checkpoint of RUN."""
    from .config import ConfigError, from_dict

    try:
        cfg = from_dict(json.loads((run / "config.json").read_text()))
    except OSError:
        raise ConfigError(f"RUN must be a run directory with config.json, got {str(run)!r}") from None
    prepare_devices(cfg)
    from .training.generate import generate as sample

    text = sample(str(run), prompt, tokens, temperature, seed)
    print(json.dumps({"text": text}) if as_json else text)


@app.command()
def bench(
    what: Annotated[Literal["layer"], typer.Argument(help="What to measure.")],
    shape: Annotated[Literal["a", "b"], typer.Option(help="a: 8 experts, top-2. b: 32 narrow experts, top-4.")] = "a",
    devices: Annotated[int, typer.Option(min=1, help="Simulated devices, where there is no GPU.")] = 8,
    repeats: Annotated[int, typer.Option(min=1)] = 7, as_json: Json = False,
) -> None:
    """Measure on the present devices, beside a bound: one dense product over as many rows."""
    import jax

    if pin_cpu_without_gpu():
        jax.config.update("jax_num_cpu_devices", devices)
    from .measure.layer import SHAPES, as_text, bench_layer

    rows = bench_layer(SHAPES[shape], repeats=repeats)
    print(json.dumps({"rows": rows}) if as_json else as_text(rows))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions and devices, and what is missing for what."""
    import jax

    pin_cpu_without_gpu()
    wanted = {"tokenizers": "train.data.tokenizer",
              "safetensors": "Hugging Face checkpoints, pip install 'jaxmoe[hf]'"}
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


def overrides(args: list[str]) -> list[str]:
    """--a.b=c and --a.b c as a.b=c."""
    from .config import ConfigError

    found, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--") or "." not in arg:
            raise ConfigError(f"unknown argument {arg!r}; config keys are given as --section.key=value")
        if "=" not in arg:
            if not rest:
                raise ConfigError(f"{arg} needs a value: {arg}=...")
            arg = f"{arg}={rest.pop(0)}"
        found.append(arg[2:])
    return found


def pin_cpu_without_gpu() -> bool:
    """On a machine with no GPU, keep an installed GPU plugin from complaining. True if the CPU was chosen."""
    import jax

    if os.path.exists("/dev/nvidia0") or os.environ.get("JAX_PLATFORMS"):
        return os.environ.get("JAX_PLATFORMS") == "cpu"
    jax.config.update("jax_platforms", "cpu")
    return True


def prepare_devices(cfg, devices: int | None = None, processes: int = 1) -> None:
    """Where there is no GPU, simulate `devices` CPU devices; unless given, this process's share of the mesh."""
    import jax

    size = math.prod(cfg.mesh.axes.values())
    if size > 0 and size % processes:
        from .config import ConfigError

        raise ConfigError(f"mesh.axes must have a product divisible by the {processes} processes, got {size}")
    size = devices or size // processes
    if pin_cpu_without_gpu() and size > 0:
        jax.config.update("jax_num_cpu_devices", size)
