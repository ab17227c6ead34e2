"""Atomic asynchronous checkpoints that restore onto whatever mesh is live."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx

KEPT_CHECKPOINTS = 2
CONFIG_FILE = "config.json"
# The model's whole state: parameters, and such as the routers' biases. Random numbers come from seed and step.
SAVED = nnx.Not(nnx.RngState)


def _pure_state(module: Any, *filters: Any) -> Any:
    state: Any = nnx.state(module, *filters)
    return nnx.to_pure_dict(state)


def _abstract(tree: Any) -> Any:
    """Shapes with the live shardings: Orbax reshards the saved arrays onto them."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def _load_pure(module: Any, values: Any, *filters: Any) -> None:
    state: Any = nnx.state(module, *filters)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(module, state)


def write_config(run_dir: str | Path, cfg: Any) -> None:
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    (Path(run_dir) / CONFIG_FILE).write_text(cfg.model_dump_json(indent=2) + "\n")


def read_config(run_dir: str | Path) -> Any:
    from jaxmoe.config import Config

    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"run_dir must hold {CONFIG_FILE}, got {str(run_dir)!r}")
    return Config.model_validate_json(path.read_text())


def has_checkpoints(run_dir: str | Path) -> bool:
    folder = Path(run_dir) / "checkpoints"
    # Unfinished saves carry a suffix after the step, so only plain numbers count.
    return folder.is_dir() and any(p.name.isdigit() for p in folder.iterdir())


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, run_dir: str | Path):
        folder = (Path(run_dir) / "checkpoints").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT_CHECKPOINTS, create=True, enable_async_checkpointing=True
        )
        self._manager = ocp.CheckpointManager(folder, options=options)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, data_state: Any) -> None:
        """Starts a save and returns; the folder gets its final name only when complete."""
        if self._manager.latest_step() == step:
            return
        # The iterator counts batches, so one process's state serves all of them.
        if isinstance(data_state, bytes):
            data_state = json.loads(data_state.decode())
        self._manager.save(
            step,
            args=ocp.args.Composite(
                model=ocp.args.StandardSave(_pure_state(model, SAVED)),
                optimizer=ocp.args.StandardSave(_pure_state(optimizer)),
                progress=ocp.args.JsonSave({"step": step, "data": data_state}),
            ),
        )

    def restore_model(self, model: nnx.Module, step: int | None = None) -> int:
        """Loads the model without the optimizer; returns the step."""
        step = self._step(step)
        abstract = _abstract(_pure_state(model, SAVED))
        restored = self._manager.restore(
            step, args=ocp.args.Composite(model=ocp.args.StandardRestore(abstract))
        )
        _load_pure(model, restored["model"], SAVED)
        return step

    def restore(self, model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[int, Any]:
        """Loads the newest state in place; returns (step, data state)."""
        step = self._step(None)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                model=ocp.args.StandardRestore(_abstract(_pure_state(model, SAVED))),
                optimizer=ocp.args.StandardRestore(_abstract(_pure_state(optimizer))),
                progress=ocp.args.JsonRestore(),
            ),
        )
        _load_pure(model, restored["model"], SAVED)
        _load_pure(optimizer, restored["optimizer"])
        return int(restored["progress"]["step"]), restored["progress"]["data"]

    def _step(self, step: int | None) -> int:
        step = self._manager.latest_step() if step is None else step
        if step is None:
            raise ValueError("train.run_dir must hold a checkpoint to restore, got none")
        return step

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
