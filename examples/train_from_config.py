"""A training loop of one's own around a config: our mesh, model, optimizer and step; data and loop are yours.

    python examples/train_from_config.py configs/quickstart.toml [steps]      # JAX_NUM_CPU_DEVICES=8 on a CPU
"""

import sys

import jax
import numpy as np

import jaxmoe
from jaxmoe.mesh import batch_sharding, roles_of
from jaxmoe.training.step import compiled_step, init_state


def main(config: str, steps: int = 10):
    cfg = jaxmoe.load_config(config)
    mesh = jaxmoe.make_mesh(cfg)
    model, optimizer = init_state(cfg, mesh)
    advance = compiled_step(cfg, model, optimizer)
    rng, sharding = np.random.default_rng(0), batch_sharding(mesh, roles_of(cfg))
    for step in range(steps):
        # Yours: tokens [B, S + 1]; mask, loss_mask and segment_ids of the same shape may go with them.
        tokens = (np.arange(cfg.model.seq + 1) + rng.integers(0, 64, (cfg.train.batch, 1))) % 64
        batch = {"tokens": jax.device_put(tokens.astype(np.int32), sharding)}
        metrics = advance(batch)
        print(f"step {step:3d}  loss {float(metrics['loss']):.4f}  dropped {float(metrics['dropped_fraction']):.3f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
