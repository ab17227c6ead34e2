"""The training loop: steps, evaluation, logs, checkpoints and the closing summary."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from jaxmoe.measure import choice
from jaxmoe.mesh import axes_size, batch_sharding, make_mesh, roles_of
from jaxmoe.plan.plan import Plan
from jaxmoe.planning import plan
from jaxmoe.roles import choose_roles
from jaxmoe.training import data as data_lib
from jaxmoe.training.checkpoint import Checkpoints, has_checkpoints, write_config
from jaxmoe.training.generate import sample
from jaxmoe.training.report import Display, MetricsLog, Throughput, read_metrics, save_plot
from jaxmoe.training.step import compiled_step, eval_step, init_state

# Tensor classes that must be finite, in the order in which a fault spreads.
WATCHED = ("loss", "router losses", "gradients", "parameters")


@contextlib.contextmanager
def _stop_at_step_end() -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM sets the event, so that a step is never cut in half; a second one interrupts."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _frame: Any) -> None:
        event.set()
        signal.signal(number, signal.default_int_handler)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_stopped(stop: threading.Event, may_ask: bool) -> bool:
    """Whether any process was told to stop; asked of the others only where all of them ask (`may_ask`)."""
    if jax.process_count() == 1:
        return stop.is_set()
    return may_ask and bool(np.any(multihost_utils.process_allgather(np.array(stop.is_set()))))


def _require_finite(step: int, metrics: dict[str, float]) -> None:
    bad = [name for name in WATCHED if not metrics["finite_" + name.replace(" ", "_")]]
    if bad:
        raise RuntimeError(
            f"training stopped at step {step}: {' and '.join(bad)} must be finite, got loss = {metrics['loss']}, "
            f"grad_norm = {metrics['grad_norm']}; the last good checkpoint is kept (try a lower train.learning_rate)"
        )


def _token_sharding(cfg: Any, mesh: Mesh) -> NamedSharding:
    roles = roles_of(cfg)
    rows = axes_size(mesh, roles.batch_axes)
    if cfg.train.batch % (rows * cfg.train.accumulate):
        raise ValueError(
            f"train.batch must be a multiple of the {rows} devices that the batch is split over (mesh axes "
            f"{', '.join(roles.batch_axes)}) times train.accumulate={cfg.train.accumulate}, got {cfg.train.batch}"
        )
    return batch_sharding(mesh, roles)


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


def _baselines(corpus: data_lib.Corpus, heldout_windows: list[np.ndarray], vocab: int) -> dict:
    """Count models scored on the windows that the model is scored on."""
    if not heldout_windows or vocab > 2**20:
        return {}
    scored = np.concatenate(heldout_windows)
    return {
        name: data_lib.ngram_nats(corpus.train, scored, order, vocab)
        for name, order in (("bigram", 2), ("trigram", 3))
    }


class Feed(NamedTuple):
    """Batches of this process; how they become arrays on the mesh; and what is held out, there already."""

    batches: Any
    place: Callable[[np.ndarray], jax.Array]
    heldout: list[jax.Array]


@dataclass
class Pending:
    """A dispatched step whose results are still on the devices."""

    step: int
    metrics: dict[str, jax.Array]
    eval_losses: list[jax.Array]


@dataclass
class Run:
    """A training run in progress. Results are read one step late, so that the devices never wait for the host."""

    cfg: Any
    model: Any
    optimizer: Any
    feed: Feed
    checkpoints: Checkpoints
    log: MetricsLog | None
    display: Display
    rate: Throughput
    step: int
    data_state: Any
    train_step: Any
    pending: Pending | None = None
    last: dict[str, float] = field(default_factory=dict)
    eval_loss: float | None = None

    def advance(self) -> None:
        """Dispatch one step, then read the results of the one before it."""
        options = self.cfg.train
        metrics = self.train_step(self.feed.place(next(self.feed.batches)["tokens"]))
        self.step += 1
        self.data_state = self.feed.batches.get_state()
        is_eval = _is_due(self.step, options.eval_every, options.steps)
        losses = [eval_step(self.model, batch)["loss"] for batch in self.feed.heldout] if is_eval else []
        late, self.pending = self.pending, Pending(self.step, metrics, losses)
        if late is not None:
            self._read(late)

    def settle(self) -> None:
        """Read what is pending; afterwards the state is known to be good."""
        late, self.pending = self.pending, None
        if late is not None:
            self._read(late)

    def save(self) -> None:
        self.settle()
        self.checkpoints.save(self.step, self.model, self.optimizer, self.data_state)
        self.rate.restart()

    def _read(self, late: Pending) -> None:
        self.last = {name: float(value) for name, value in jax.device_get(late.metrics).items()}
        _require_finite(late.step, self.last)
        self.rate.count_step()
        self.display.advance(late.step)
        options = self.cfg.train
        if late.eval_losses:
            self.eval_loss = float(np.mean(jax.device_get(late.eval_losses)))
            self.rate.restart()
        if late.eval_losses or _is_due(late.step, options.log_every, options.steps):
            self._report(late)

    def _report(self, late: Pending) -> None:
        shown = {name: value for name, value in self.last.items() if not name.startswith("finite_")}
        row = {"step": late.step, "eval_loss": self.eval_loss if late.eval_losses else None, **shown,
               "tokens_per_second": self.rate.take_window()}
        if self.log is not None:
            self.log.write(row)
        self.display.show(row)


def _feed(cfg: Any, mesh: Mesh, corpus: data_lib.Corpus, windows: list[np.ndarray]) -> Feed:
    options, sharding = cfg.train, _token_sharding(cfg, mesh)

    def placer(batch: int):
        rows = data_lib.rows_of_process(sharding, batch)
        return rows, lambda local: data_lib.on_devices(local, rows, batch, sharding)

    rows, place = placer(options.batch)
    batches = data_lib.train_iterator(corpus.train, cfg.model.seq, options.batch, options.seed, rows)
    eval_rows, place_eval = placer(options.batch // options.accumulate)
    return Feed(batches, place, [place_eval(window[eval_rows]) for window in windows])


def _set_up(cfg: Any, resume: bool, quiet: bool, corpus: data_lib.Corpus, windows: list[np.ndarray]) -> Run:
    """State, data and logs; from the last checkpoint with `resume`."""
    options, run_dir, is_first = cfg.train, _check_run_dir(cfg, resume), jax.process_index() == 0
    mesh = make_mesh(cfg)
    feed = _feed(cfg, mesh, corpus, windows)
    made, how = measured_plan(cfg, mesh, run_dir, resume)
    model, optimizer = init_state(cfg, mesh, made)
    if is_first:
        write_config(run_dir, cfg)
    checkpoints = Checkpoints(run_dir)
    step, data_state = 0, feed.batches.get_state()
    if resume:
        step, data_state = checkpoints.restore(model, optimizer)
        feed.batches.set_state(data_state)
    display = Display(options.steps, step, quiet or not is_first)
    for line in (how, f"resumed at step {step} of {options.steps}" if resume else ""):
        if line:
            display.say(line)
    loss, eval_loss = _last_losses(run_dir, step)
    return Run(cfg, model, optimizer, feed, checkpoints, MetricsLog(run_dir, step) if is_first else None, display,
               Throughput(options.batch * cfg.model.seq), step, data_state, compiled_step(cfg, model, optimizer),
               last={"loss": loss}, eval_loss=eval_loss)


def _last_losses(run_dir: Path, step: int) -> tuple[float, float | None]:
    """Of training and of what is held out, when that was last scored, up to this step."""
    scored = [row for row in read_metrics(run_dir) if row.get("eval_loss") is not None and row["step"] <= step]
    return (scored[-1]["loss"], scored[-1]["eval_loss"]) if scored else (math.nan, None)


def measured_plan(cfg: Any, mesh: Mesh, run_dir: Path, resume: bool) -> tuple[Plan | None, str]:
    """The plan that measurements choose, and a line that says how; None if the config does not ask for that. What is
    resumed goes on with the plan that it kept, if that still fits."""
    if not choice.wants_measurements(cfg):
        return None, ""
    kept, again = run_dir / "plan.json", ""
    if resume and kept.is_file():
        schedule = cfg.schedule.model_copy(update={"plan": str(kept), "sm_aware": False})   # it is tied already
        try:
            return plan(cfg.model_copy(update={"schedule": schedule})), ""
        except ValueError as e:
            again = f"measured again, as {e}; "
    found = choice.choose(cfg, mesh)
    if jax.process_index() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        kept.write_text(found.plan.to_json())
        (run_dir / "cluster.toml").write_text(found.cluster.to_toml())
    return found.plan, again + found.text


def _steps(run: Run) -> None:
    """All steps; Ctrl-C saves the last whole one."""
    options = run.cfg.train
    try:
        with _stop_at_step_end() as stop:
            while run.step < options.steps:
                run.advance()
                if _is_due(run.step, options.checkpoint_every, options.steps):
                    run.save()
                if _is_stopped(stop, _is_due(run.step, options.log_every, options.steps)):
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        _save_interrupted(run)
        raise
    finally:
        run.display.close()
        run.checkpoints.close()
        if run.log is not None:
            run.log.close()


def _save_interrupted(run: Run) -> None:
    # The optimizer counts its steps, so a step cut in half by a second Ctrl-C shows.
    if int(run.optimizer.step[...]) == run.step:
        run.save()
    run.checkpoints.wait()
    run.display.close()
    step = run.checkpoints.latest_step()
    if jax.process_index() == 0:
        print("interrupted: no step was saved" if step is None else f"interrupted: step {step} is saved in "
              f"{run.cfg.train.run_dir}; go on with `jaxmoe train CONFIG --resume`", file=sys.stderr)


def train(cfg: Any, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Trains `cfg` into `cfg.train.run_dir`; returns the summary.

    Keys: steps, final_loss, eval_loss, tokens_per_second, run_dir, sample, plot, baselines.
    """
    cfg = choose_roles(cfg)
    options, run_dir = cfg.train, Path(cfg.train.run_dir)
    corpus = data_lib.load_corpus(cfg)
    windows = data_lib.heldout_batches(corpus.heldout, cfg.model.seq, options.batch // options.accumulate,
                                       options.eval_batches * options.accumulate)
    run = _set_up(cfg, resume, quiet, corpus, windows)
    _steps(run)
    is_first = jax.process_index() == 0
    baselines = _baselines(corpus, windows, cfg.model.vocab) if is_first else {}
    if run.eval_loss is not None and baselines:
        beside = ", ".join(f"{name} {nats:.4f}" for name, nats in baselines.items())
        run.display.say(f"held-out {run.eval_loss:.4f} nats per token ({beside})")
    text = _sample_text(cfg, run.model, corpus.codec)
    return {
        "steps": run.step,
        "final_loss": run.last["loss"],
        "eval_loss": run.eval_loss,
        "tokens_per_second": run.rate.overall(),
        "run_dir": str(run_dir),
        "sample": text,
        "plot": save_plot(run_dir, baselines) if is_first else None,
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
