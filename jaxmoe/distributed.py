"""Multi-process runs: one process a host or a GPU, joined before JAX is first used."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping


def is_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """True in a SLURM step of several tasks."""
    return "SLURM_JOB_ID" in environ and int(environ.get("SLURM_NTASKS", "1")) > 1


def process_count(num_processes: int | None = None) -> int:
    """Processes of this run: as given, or SLURM's tasks, or 1."""
    return num_processes or (int(os.environ["SLURM_NTASKS"]) if is_slurm() else 1)


def initialize(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> bool:
    """Join a multi-process run; True if there is one. Does nothing in a run of one process, or when called again.

    coordinator: "host:port" of process 0, which all reach; num_processes and process_id go with it. Without them, a
    SLURM step of several tasks is joined by itself. On CPUs, collectives go over Gloo (TCP).
    """
    import jax

    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"{', '.join(given)} must be given together, got no {' or '.join(missing)}")
    if num_processes is not None and not 0 <= (process_id or 0) < num_processes:
        raise ValueError(f"--process-id must be from 0 to --num-processes - 1 = {num_processes - 1}, got {process_id}")
    if coordinator is None and not is_slurm():
        return False
    if not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        with stdout_to_stderr():
            jax.distributed.initialize(coordinator, num_processes, process_id)
            jax.devices()   # makes the backend, and with it Gloo's connections
    return True


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What C++ code writes on stdout goes to stderr, so that --json stays one object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
