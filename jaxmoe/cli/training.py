"""train, describe and generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .common import FREE, Json, app, overrides, pin_cpu_without_gpu, prepare_devices


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
    from ..config import load_config
    from ..distributed import initialize, process_count, stdout_to_stderr

    cfg = load_config(config, overrides(context.args))
    prepare_devices(cfg, devices, process_count(num_processes))
    initialize(coordinator, num_processes, process_id)
    import jax

    from ..training.loop import train as run

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
    from ..config import load_config

    cfg = load_config(config, overrides(context.args))
    pin_cpu_without_gpu()
    from ..roles import choose_roles
    from ..training.describe import as_text
    from ..training.describe import describe as found_in

    found = found_in(choose_roles(cfg))
    print(json.dumps(found) if as_json else as_text(found))


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    tokens: Annotated[int, typer.Option(min=1)] = 200, temperature: Annotated[float, typer.Option(min=0)] = 0.8,
    seed: int = 0, as_json: Json = False,
) -> None:
    """Sample from the last checkpoint of RUN."""
    from ..config import ConfigError, from_dict

    try:
        cfg = from_dict(json.loads((run / "config.json").read_text()))
    except OSError:
        raise ConfigError(f"RUN must be a run directory with config.json, got {str(run)!r}") from None
    prepare_devices(cfg)
    from ..training.generate import generate as sample

    text = sample(str(run), prompt, tokens, temperature, seed)
    print(json.dumps({"text": text}) if as_json else text)
