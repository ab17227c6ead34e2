"""Twenty training steps give the same losses however many devices there are."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxmoe.config import from_dict
from jaxmoe.training.step import init_state, train_step

pytestmark = pytest.mark.core
ALONE = {"data": ["a"], "expert": ["a"], "fsdp": ["a"]}
MIXED = {"data": ["a", "b"], "expert": ["b"], "expert_shard": ["c"], "model": ["c"], "fsdp": ["a"]}
MESHES = {
    "expert 2": ({"a": 2}, ALONE), "expert 4": ({"a": 4}, ALONE), "expert 8": ({"a": 8}, ALONE),
    "mixed 2 2 2": ({"a": 2, "b": 2, "c": 2}, MIXED), "mixed 1 2 2": ({"a": 1, "b": 2, "c": 2}, MIXED),
}
FAST = ("expert 8", "mixed 2 2 2")


def losses(axes, parallel):
    cfg = from_dict({
        "mesh": {"axes": axes}, "parallel": parallel, "moe": {"d_ff": 16},
        "model": {"layers": 1, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 16, "seq": 16, "vocab": 64},
        "train": {"steps": 20, "warmup_steps": 2},
    })
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes),
                         devices=jax.devices()[: math.prod(axes.values())])
    model, optimizer = init_state(cfg, mesh)
    tokens = np.random.default_rng(0).integers(0, 64, (20, 8, 17)).astype(np.int32)
    return [float(train_step(model, optimizer, batch)["loss"]) for batch in tokens]


@pytest.fixture(scope="module")
def one_device():
    return losses({"a": 1}, ALONE)


@pytest.mark.parametrize(("axes", "parallel"), [
    pytest.param(*mesh, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, mesh in MESHES.items()])
def test_same_losses(axes, parallel, one_device):
    np.testing.assert_allclose(losses(axes, parallel), one_device, rtol=1e-4)
