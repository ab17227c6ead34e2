"""What a run tells: its metrics file, lines on the terminal, throughput, and a plot of its losses."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any


class MetricsLog:
    """run_dir/metrics.jsonl and TensorBoard events; written by the first process only."""

    def __init__(self, run_dir: Path, restored_step: int):
        from tensorboardX import SummaryWriter

        self.path = run_dir / "metrics.jsonl"
        kept = [row for row in read_metrics(run_dir) if row["step"] <= restored_step]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = self.path.open("a")
        self._events = SummaryWriter(str(run_dir / "events"), purge_step=restored_step + 1)

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if name != "step" and value is not None:
                self._events.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        # A killed run can leave half a line at the end.
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


class Display:
    """A progress bar on a terminal, plain lines elsewhere, nothing when quiet."""

    def __init__(self, steps: int, start: int, quiet: bool):
        self._bar = None
        self._quiet = quiet
        self._steps = steps
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=steps, completed=start)
            self._bar.start()

    def advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, row: dict[str, Any]) -> None:
        text = f"loss {row['loss']:.4f}"
        if row.get("eval_loss") is not None:
            text += f"  held-out {row['eval_loss']:.4f}"
        text += f"  dropped {row['dropped_fraction']:.3f}"
        if row["tokens_per_second"] is not None:
            text += f"  {row['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        else:
            self.say(f"step {row['step']}/{self._steps}  {text}")

    def say(self, line: str) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Throughput:
    """Tokens per second of training steps; compilation, evaluation and saves are excluded."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._since: float | None = None
        self._seconds = self._window_seconds = 0.0
        self._steps = self._window_steps = 0

    def restart(self) -> None:
        """What happened since the last call was not training."""
        self._since = time.perf_counter()

    def count_step(self) -> None:
        """One more step is finished on the device."""
        now = time.perf_counter()
        if self._since is not None:
            self._seconds += now - self._since
            self._window_seconds += now - self._since
            self._steps += 1
            self._window_steps += 1
        self._since = now

    def take_window(self) -> float | None:
        rate = self._rate(self._window_steps, self._window_seconds)
        self._window_seconds, self._window_steps = 0.0, 0
        return rate

    def overall(self) -> float | None:
        return self._rate(self._steps, self._seconds)

    def _rate(self, steps: int, seconds: float) -> float | None:
        return steps * self._tokens_per_step / seconds if steps and seconds else None


def save_plot(run_dir: Path, baselines: dict[str, float]) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = read_metrics(run_dir)
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for key, label in (("loss", "training"), ("eval_loss", "held-out")):
        points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="." if key != "loss" else None)
    for (name, nats), style in zip(baselines.items(), ("--", ":"), strict=False):
        axes.axhline(nats, color="grey", linestyle=style, label=f"{name} {nats:.2f}")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    path = run_dir / "loss.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return str(path)
