"""A layer's collectives are those intended and no more, counted on the lowered text (item by item in CONTRIBUTING).

Statistics take one all-reduce of sums and one of a maximum; a router's gradient one more. Experts take two All-to-Alls
forward and two backward, and no gather of weights; their hidden width a gather and a reduce-scatter each way; stored
shards a gather, whose gradient is a reduce-scatter. Dropless dispatch exchanges sizes, too.
"""

import importlib.util
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe import MoE, Ragged, Roles, Slots, load_cluster, load_config
from jaxmoe.plan.prove import read
from jaxmoe.proof import lowered_step, target_mesh

pytestmark = pytest.mark.core
KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "collective_permute")


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


#       mesh, roles, layout: forward, forward and backward; as (all_to_all, all_gather, reduce_scatter, all_reduce)
CASES = {
    "data": (dict(d=8), Roles(("d",)), Slots(1.0), (0, 0, 0, 2), (0, 0, 0, 6)),
    "expert": (dict(d=8), Roles(("d",), ("d",)), Slots(1.0), (2, 0, 0, 2), (4, 0, 0, 3)),
    "expert on two axes": (dict(a=2, b=4), Roles(("a", "b"), ("a", "b")), Slots(1.0), (2, 0, 0, 2), (4, 0, 0, 3)),
    "expert ragged": (dict(d=8), Roles(("d",), ("d",)), Ragged(), (3, 0, 0, 2), (5, 0, 0, 3)),
    "fsdp": (dict(d=8), Roles(fsdp=("d",)), Slots(1.0), (0, 3, 0, 2), (0, 3, 3, 3)),
    "expert_shard": (dict(d=8), Roles(("d",), (), ("d",)), Slots(1.0), (0, 1, 1, 2), (0, 2, 2, 3)),
}


def counts(fn, *args):
    text = jax.jit(fn).lower(*args).as_text()
    found = Counter(re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_permute)", text))
    assert set(found) <= set(KINDS)
    assert not found["collective_permute"]
    return tuple(found[kind] for kind in KINDS[:4])


@pytest.mark.parametrize(("axes", "roles", "dispatch", "forward", "both"), CASES.values(), ids=CASES)
def test_case_33_collectives_are_those_intended(axes, roles, dispatch, forward, both):
    moe = MoE(16, 32, 8, dispatch=dispatch, mesh=mesh(**axes), roles=roles, rngs=nnx.Rngs(0))
    graph, state = nnx.split(moe)

    def layer(state, x):
        y, aux = nnx.merge(graph, state)(x)
        return y.sum() + aux.losses["load_balance"] + aux.losses["router_z"], aux

    x = jnp.ones((8, 8, 16))
    assert counts(layer, state, x) == forward
    assert counts(jax.grad(layer, (0, 1), has_aux=True), state, x) == both


def test_expert_weights_are_never_whole():
    """Argument bytes of a device are the sum over parameters of bytes / devices that share them, exactly."""
    where = mesh(a=2, b=2, c=2)
    roles = Roles(("a", "b"), ("b",), ("c",), ("c",), ("a",))
    moe = MoE(16, 32, 8, mesh=where, roles=roles, rngs=nnx.Rngs(0))
    graph, state = nnx.split(moe)
    x = jax.device_put(jnp.ones((8, 8, 16)), jax.NamedSharding(where, jax.P(("a", "b"), "c")))
    compiled = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0]).lower(state, x).compile()
    experts, router, tokens = 3 * 8 * 16 * 32 * 4 // 8, 16 * 8 * 4, 8 * 8 * 16 * 4 // 8
    assert compiled.memory_analysis().argument_size_in_bytes == experts + router + tokens
    for leaf in jax.tree.leaves(state):
        shards = leaf.addressable_shards
        assert {s.data.nbytes for s in shards} == {leaf.nbytes // 8 if leaf.ndim == 3 else leaf.nbytes}


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None,
                    reason="XLA's compiler for NVIDIA GPUs: pip install 'jaxmoe[prove]'")
@pytest.mark.slow
def test_a_train_steps_collectives_on_eight_gpus():
    """Stored parameters are gathered, their gradients reduce-scattered; experts' are neither; no large all-reduce."""
    cluster = load_cluster("8x8-h100").model_copy(update={"nodes": 1})
    cfg = load_config("configs/quickstart.toml", ["model.vocab=4096"])
    text = lowered_step(cfg, target_mesh(cfg, cluster), None).compile().as_text()
    flights = [f for c in read(text) for f in c.flights]
    found = Counter(f.kind for f in flights)
    assert found["all-to-all"] == 4 * cfg.model.layers
    assert found["reduce-scatter"] > 0 and found["all-gather"] > 0
    experts = cfg.moe.num_experts * cfg.model.d_model * cfg.moe.d_ff
    moved = re.findall(r"= \(?f32\[([\d,]+)\]\S* (?:all-gather|reduce-scatter|all-reduce)(?:-start)?\(", text)
    sizes = [math.prod(map(int, shape.split(","))) for shape in moved]
    assert sizes and max(sizes) < experts
    reduced = re.findall(r"= \(?f32\[([\d,]+)\]\S* all-reduce(?:-start)?\(", text)
    assert all(math.prod(map(int, s.split(","))) < cfg.model.d_model * cfg.model.d_model for s in reduced), reduced
