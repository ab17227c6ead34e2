"""The quickstart with coded collectives and with the same words uncoded: the same bits, step by step?

    python benchmarks/quickstart_codec.py --steps 200

Trains in bfloat16 under the sequential plan, twice, into DIRECTORY/x3p and DIRECTORY/raw; compares losses of all
steps and every array of the last checkpoints (parameters and optimizer state), bit for bit; prints what was sent.
Exit 1 if anything differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmoe import load_config
from jaxmoe.cli.common import prepare_devices
from jaxmoe.mesh import make_mesh
from jaxmoe.training.checkpoint import Checkpoints
from jaxmoe.training.loop import train
from jaxmoe.training.report import read_metrics
from jaxmoe.training.step import init_state
from jaxmoe.types import TENSOR_CLASSES

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.toml"


def run(codec: str, steps: int, directory: Path) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """Logged rows, and the arrays of the last checkpoint."""
    run_dir = directory / codec
    cfg = load_config(CONFIG, [f"train.steps={steps}", "train.precision=bfloat16", "train.log_every=1",
                               "model.scan=true", "schedule.kind=sequential", f"codec.kind={codec}",
                               f"train.run_dir={run_dir}"])
    prepare_devices(cfg)
    train(cfg, quiet=True)
    model, optimizer = init_state(cfg, make_mesh(cfg))
    checkpoints = Checkpoints(run_dir)
    checkpoints.restore(model, optimizer)
    checkpoints.close()
    return read_metrics(run_dir), [np.asarray(a) for a in jax.tree.leaves(nnx.state((model, optimizer)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", type=Path, help="where runs are kept; a temporary one if left out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        (coded, coded_state), (raw, raw_state) = (
            run(codec, args.steps, args.directory or Path(temporary)) for codec in ("x3p", "raw"))
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (coded, raw)]
    same = [a.tobytes() == b.tobytes() for a, b in zip(coded_state, raw_state, strict=True)]
    print(f"{len(losses[0])} losses, {losses[0][0]:.4f} to {losses[0][-1]:.4f}: "
          f"{'the same' if losses[0] == losses[1] else 'different'}")
    print(f"{len(same)} arrays of parameters and optimizer state: {sum(same)} the same")
    for name in TENSOR_CLASSES:
        sent, uncoded, fallbacks = (sum(row.get(f"codec_{field}_{name}", 0.0) for row in coded)
                                    for field in ("wire_bytes", "raw_bytes", "fallbacks"))
        print(f"{name}: {sent / uncoded:.3f} of the bytes, {fallbacks / len(losses[0]):.2f} fallbacks a step")
    sys.exit(0 if losses[0] == losses[1] and all(same) else 1)


if __name__ == "__main__":
    main()
