"""The training loop: steps, evaluation, logs, checkpoints and the closing summary."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxmoe.mesh import axes_size, batch_sharding, make_mesh, roles_of
from jaxmoe.training import data as data_lib
from jaxmoe.training.checkpoint import Checkpoints, has_checkpoints, write_config
from jaxmoe.training.generate import sample
from jaxmoe.training.step import eval_step, init_state, train_step

_WATCHED = ("loss", "grad_norm")


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

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self, steps: int) -> None:
        """Counts `steps` steps, finished on the device, since `start`."""
        if self._since is None:
            return
        seconds = time.perf_counter() - self._since
        self._since = None
        self._seconds += seconds
        self._window_seconds += seconds
        self._steps += steps
        self._window_steps += steps

    def take_window(self) -> float | None:
        rate = self._rate(self._window_steps, self._window_seconds)
        self._window_seconds, self._window_steps = 0.0, 0
        return rate

    def overall(self) -> float | None:
        return self._rate(self._steps, self._seconds)

    def _rate(self, steps: int, seconds: float) -> float | None:
        return steps * self._tokens_per_step / seconds if steps and seconds else None


@contextlib.contextmanager
def _stop_at_step_end() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step is never cut in half; a second one interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(_signum: int, _frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)


def _require_finite(step: int, metrics: dict[str, float]) -> None:
    bad = [name for name in _WATCHED if not math.isfinite(metrics[name])]
    if bad:
        values = ", ".join(f"{name} = {metrics[name]}" for name in bad)
        raise RuntimeError(
            f"training stopped at step {step}: {' and '.join(bad)} must be finite, got {values}; "
            "the last good checkpoint is kept (try a lower train.learning_rate)"
        )


def _token_sharding(cfg: Any, mesh: Mesh) -> NamedSharding:
    roles = roles_of(cfg)
    rows = axes_size(mesh, roles.batch_axes)
    if cfg.train.batch % rows:
        raise ValueError(
            f"train.batch must be divisible by the {rows} devices that the batch is split over "
            f"(mesh axes {', '.join(roles.batch_axes)}), got {cfg.train.batch}"
        )
    return batch_sharding(mesh, roles)


def _on_devices(tokens: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, np.asarray(tokens, np.int32))


def _process_rows(batch: np.ndarray) -> np.ndarray:
    """This process's share of a batch that every process holds whole."""
    rows = len(batch) // jax.process_count()
    return batch[jax.process_index() * rows : (jax.process_index() + 1) * rows]


def _evaluate(model: Any, batches: list[jax.Array]) -> float | None:
    losses = [eval_step(model, batch)["loss"] for batch in batches]
    return float(np.mean(jax.device_get(losses))) if losses else None


def _is_due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def _check_run_dir(cfg: Any, resume: bool) -> Path:
    run_dir = Path(cfg.train.run_dir)
    if has_checkpoints(run_dir) and not resume:
        raise ValueError(
            f"train.run_dir must hold no checkpoints for a new run, got {str(run_dir)!r}: "
            "use --resume or another train.run_dir"
        )
    if resume and not has_checkpoints(run_dir):
        raise ValueError(f"--resume needs a checkpoint in train.run_dir, got none in {str(run_dir)!r}")
    return run_dir


def _save_plot(run_dir: Path, baselines: dict[str, float]) -> str:
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


def _baselines(corpus: data_lib.Corpus, heldout_windows: list[np.ndarray], vocab: int) -> dict:
    """Count models scored on the windows that the model is scored on."""
    if not heldout_windows or vocab > 2**20:
        return {}
    scored = np.concatenate(heldout_windows)
    return {
        name: data_lib.ngram_nats(corpus.train, scored, order, vocab)
        for name, order in (("bigram", 2), ("trigram", 3))
    }


def train(cfg: Any, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Trains `cfg` into `cfg.train.run_dir`; returns the summary.

    Keys: steps, final_loss, eval_loss, tokens_per_second, run_dir, sample, plot.
    """
    options = cfg.train
    run_dir = _check_run_dir(cfg, resume)
    corpus = data_lib.load_corpus(cfg)
    batches: Any = data_lib.train_iterator(corpus.train, cfg.model.seq, options.batch, options.seed)
    windows = data_lib.heldout_batches(
        corpus.heldout, cfg.model.seq, options.batch, options.eval_batches
    )
    mesh = make_mesh(cfg)
    sharding = _token_sharding(cfg, mesh)
    heldout = [_on_devices(_process_rows(w), sharding) for w in windows]
    model, optimizer = init_state(cfg, mesh)

    is_first_process = jax.process_index() == 0
    if is_first_process:
        write_config(run_dir, cfg)
    checkpoints = Checkpoints(run_dir)
    step = 0
    data_state = batches.get_state()
    if resume:
        step, data_state = checkpoints.restore(model, optimizer)
        batches.set_state(data_state)
    log = MetricsLog(run_dir, step) if is_first_process else None
    display = Display(options.steps, step, quiet or not is_first_process)
    if resume:
        display.say(f"resumed at step {step} of {options.steps}")
    rate = Throughput(options.batch * cfg.model.seq)
    coefs = {
        "load_balance_coef": cfg.moe.load_balance_coef,
        "router_z_coef": cfg.moe.router_z_coef,
    }
    previous = [row for row in read_metrics(run_dir) if row.get("eval_loss") is not None]
    last: dict[str, float] = {"loss": previous[-1]["loss"] if previous else math.nan}
    eval_loss = previous[-1]["eval_loss"] if previous else None
    is_compiled = False

    try:
        with _stop_at_step_end() as stop:
            while step < options.steps:
                if is_compiled:
                    rate.start()
                tokens = _on_devices(next(batches)["tokens"], sharding)
                metrics = train_step(model, optimizer, tokens, **coefs)
                # Reading the metrics waits for the step, so a bad one stops before any save.
                last = {name: float(value) for name, value in jax.device_get(metrics).items()}
                rate.stop(1)
                is_compiled = True
                _require_finite(step + 1, last)
                step += 1
                data_state = batches.get_state()
                display.advance(step)

                is_eval = _is_due(step, options.eval_every, options.steps)
                if is_eval:
                    eval_loss = _evaluate(model, heldout)
                if is_eval or _is_due(step, options.log_every, options.steps):
                    row = {
                        "step": step,
                        "loss": last["loss"],
                        "eval_loss": eval_loss if is_eval else None,
                        "load_balance": last["load_balance"],
                        "router_z": last["router_z"],
                        "grad_norm": last["grad_norm"],
                        "dropped_fraction": last["dropped_fraction"],
                        "tokens_per_second": rate.take_window(),
                    }
                    if log is not None:
                        log.write(row)
                    display.show(row)
                if _is_due(step, options.checkpoint_every, options.steps):
                    checkpoints.save(step, model, optimizer, data_state)
                if stop.is_set():
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        # The optimizer counts its steps, so a step cut in half by a second Ctrl-C shows.
        if int(optimizer.step[...]) == step:
            checkpoints.save(step, model, optimizer, data_state)
        display.close()
        print(
            f"interrupted: resume from step {checkpoints.latest_step()} with "
            "`jaxmoe train CONFIG --resume`",
            file=sys.stderr,
        )
        raise
    finally:
        display.close()
        checkpoints.close()
        if log is not None:
            log.close()

    baselines = _baselines(corpus, windows, cfg.model.vocab) if is_first_process else {}
    display = Display(options.steps, step, quiet or not is_first_process)
    display.close()
    if eval_loss is not None and baselines:
        beside = ", ".join(f"{name} {nats:.4f}" for name, nats in baselines.items())
        display.say(f"held-out {eval_loss:.4f} nats per token ({beside})")
    text = _sample_text(cfg, model, corpus.codec)
    display.say(f"sample: {text}")
    return {
        "steps": step,
        "final_loss": last["loss"],
        "eval_loss": eval_loss,
        "tokens_per_second": rate.overall(),
        "run_dir": str(run_dir),
        "sample": text,
        "plot": _save_plot(run_dir, baselines) if is_first_process else None,
        "baselines": baselines,
    }


def _sample_text(cfg: Any, model: Any, codec: Any) -> str:
    prompt = codec.encode(cfg.train.sample_prompt.encode())
    drawn = sample(
        model,
        # Byte or token 0 separates files, so it starts a text of its own.
        prompt if len(prompt) else [data_lib.SEPARATOR_BYTE],
        cfg.train.sample_tokens,
        0.8,
        jax.random.key(cfg.train.seed),
        window=cfg.model.seq,
    )
    return cfg.train.sample_prompt + codec.decode(drawn)
