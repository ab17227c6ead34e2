"""Checkpoints restore exactly onto any mesh and mix of roles."""

import math

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe.config import from_dict
from jaxmoe.training.checkpoint import SAVED, Checkpoints
from jaxmoe.training.step import eval_step, init_state, train_step

FSDP = {"data": ["a"], "expert": ["a"], "fsdp": ["a"]}
SOURCES = {
    "expert 2 x model 2": ({"a": 2, "b": 2}, {"data": ["a"], "expert": ["a"], "model": ["b"]}),
    "8 devices": ({"a": 8}, FSDP),
}
TARGETS = {
    "expert 4": ("expert 2 x model 2", {"a": 4}, {"data": ["a"], "expert": ["a"]}),
    "1": ("expert 2 x model 2", {"a": 1}, FSDP),
    "model 4": ("expert 2 x model 2", {"a": 4}, {"model": ["a"], "expert": ["a"]}),
    "8 to 4": ("8 devices", {"a": 4}, FSDP), "8 to 2": ("8 devices", {"a": 2}, FSDP),
    "8 to 1": ("8 devices", {"a": 1}, FSDP),
}
FAST = ("expert 4", "model 4", "8 to 2")
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 8, 9)).astype(np.int32)


def new_state(axes, parallel, seed=0):
    cfg = from_dict({
        "mesh": {"axes": axes}, "parallel": parallel,
        "moe": {"d_ff": 16, "router": {"score": "sigmoid", "bias_update_rate": 0.01}},
        "model": {"layers": 1, "d_model": 16, "heads": 4, "kv_heads": 4, "d_ff": 16, "seq": 8, "vocab": 64},
        "train": {"steps": 20, "warmup_steps": 0, "seed": seed},
    })
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes),
                         devices=jax.devices()[: math.prod(axes.values())])
    return init_state(cfg, mesh)


def arrays(model, optimizer):
    state = (nnx.to_pure_dict(nnx.state(model, SAVED)), nnx.to_pure_dict(nnx.state(optimizer)))
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def next_loss(model):
    return float(eval_step(model, TOKENS[2])["loss"])


def next_losses(model, optimizer):
    """The second one depends on what the first step made of the optimizer's state."""
    return [float(train_step(model, optimizer, tokens)["loss"]) for tokens in TOKENS[2:]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each source: folder, arrays when saved, and the next two losses."""
    found = {}
    for name, place in SOURCES.items():
        state = new_state(*place)
        for tokens in TOKENS[:2]:
            train_step(*state, tokens)
        folder = tmp_path_factory.mktemp("run")
        checkpoints = Checkpoints(folder)
        checkpoints.save(2, *state, {"next": 2})
        checkpoints.close()
        found[name] = folder, arrays(*state), next_losses(*state)
    return found


@pytest.mark.parametrize(("source", "axes", "parallel"), [
    pytest.param(*target, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, target in TARGETS.items()])
def test_case_39_restores_onto_other_meshes(source, axes, parallel, saved):
    folder, before, losses = saved[source]
    state = new_state(axes, parallel, seed=1)
    checkpoints = Checkpoints(folder)
    assert checkpoints.restore(*state) == (2, {"next": 2})
    checkpoints.close()
    after = arrays(*state)
    assert after.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    np.testing.assert_allclose(next_loss(state[0]), losses[0], rtol=1e-5)
    if axes == {"a": 2}:   # the optimizer's arrays are equal, so that one mesh is enough
        np.testing.assert_allclose(next_losses(*state), losses, rtol=1e-5)


def test_case_40_the_file_holds_every_expert(saved):
    folder, before, _ = saved["8 devices"]
    step = folder / "checkpoints" / "2" / "model"
    cpu = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpointer = ocp.StandardCheckpointer()
    shapes = checkpointer.metadata(step).item_metadata.tree
    tree = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=cpu), shapes)
    found = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in
             jax.tree_util.tree_leaves_with_path(checkpointer.restore(step, tree))}
    experts = [name for name in found if name.endswith(("_EDF']", "_EFD']"))]
    assert len(experts) == 3
    for name in experts:
        assert found[name].shape[0] == 8
        assert len({expert.tobytes() for expert in found[name]}) == 8, name
    assert any("bias" in name for name in found)


def test_case_20_the_bias_is_saved_and_outside_the_optimizer(saved):
    _, before, _ = saved["8 devices"]
    biases = {name: array for name, array in before.items() if "bias" in name}
    assert len(biases) == 1 and all(name.startswith("[0]") for name in biases)
    for array in biases.values():
        assert np.abs(array).max() > 0
        np.testing.assert_allclose(array.mean(), 0, atol=1e-7)
