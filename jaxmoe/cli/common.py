"""What commands share: the app, options, config overrides and the devices they run on."""

from __future__ import annotations

import math
import os
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Train Mixture-of-Experts transformers in JAX.")
FREE = {"ignore_unknown_options": True, "allow_extra_args": True}
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def overrides(args: list[str]) -> list[str]:
    """--a.b=c and --a.b c as a.b=c."""
    from ..config import ConfigError

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
        from ..config import ConfigError

        raise ConfigError(f"mesh.axes must have a product divisible by the {processes} processes, got {size}")
    size = devices or size // processes
    if pin_cpu_without_gpu() and size > 0:
        jax.config.update("jax_num_cpu_devices", size)
