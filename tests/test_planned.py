"""Layers and models run as plans say: the same values and gradients as without a plan, in float64."""

import json
import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe import MoE, NoisyTopK, Plan, Ragged, Roles, Slots, Soft, TopK
from jaxmoe.config import ConfigError, from_dict
from jaxmoe.experts import ExpertWeights
from jaxmoe.layer import apply
from jaxmoe.models import DecoderLM
from jaxmoe.plan.block import SAVED, less_saved
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.schedules import SCHEDULES
from jaxmoe.plan.tasks import Degrees
from jaxmoe.planned import moe_block
from jaxmoe.planning import plan as plan_of

pytestmark = pytest.mark.usefixtures("x64")
CPU = load_cluster("cpu-8")
B, S, D, F, E = 8, 8, 16, 32, 8
PLACES = {
    "alone": ({}, None),
    "expert": ({"d": 8}, Roles(("d",), ("d",))),
    "fsdp": ({"d": 8}, Roles(fsdp=("d",))),
    "expert-shard": ({"a": 4, "b": 2}, Roles(("a", "b"), ("a",), ("b",))),
    "all": ({"a": 2, "b": 2, "c": 2}, Roles(("a", "b"), ("b",), ("c",), ("c",), ("a",))),
}
BOTH_LINKS = {   # experts over both; "c" is within nodes
    "node, gpu": ({"a": 2, "c": 4}, Roles(("a", "c"), ("a", "c"))),
    "gpu, node": ({"a": 2, "c": 4}, Roles(("a", "c"), ("c", "a"))),
    "three axes": ({"a": 2, "c": 2, "b": 2}, Roles(("a", "b", "c"), ("a", "c", "b"))),
}
MODEL_PLACES = {   # where slots can be shared out: model alone, on axes of its own, and on those of expert
    "model": ({"a": 4}, Roles(model=("a",))),
    "apart": ({"a": 2, "b": 2, "c": 2}, Roles(("a", "b"), ("a",), ("b",), ("c",))),
    "same": ({"a": 2, "b": 4}, Roles(("a",), ("b",), (), ("b",))),
}
LAYOUTS = {"slots": Slots(1.0), "ragged": Ragged(0.5), "enough slots": Slots(4.0)}


def mesh_of(axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes),
                         devices=jax.devices()[: math.prod(axes.values())]) if axes else None


@cache
def layer(place, layout, router=TopK(2)):
    """A layer's function of (plan, router, experts, x), and its arguments."""
    axes, roles = (PLACES | MODEL_PLACES | BOTH_LINKS)[place]
    moe = MoE(D, F, E, router=router, dispatch=LAYOUTS[layout], mesh=mesh_of(axes), roles=roles, rngs=nnx.Rngs(0),
              dtype=jnp.float64)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, S, D)))
    mask = jnp.asarray(np.random.default_rng(1).random((B, S)) < 0.9)
    weights = ExpertWeights(moe.w_up_EDF[...], moe.w_down_EFD[...], moe.w_gate_EDF[...])

    def values(schedule, router, w, x):
        y, aux = apply(moe.spec, router, w, x, mask, schedule=schedule, key=jax.random.key(3))
        loss = (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum()
        return loss + 0.3 * aux.losses["load_balance"] + aux.losses["router_z"] + aux.losses["importance"], (y, aux)

    run = jax.jit(jax.value_and_grad(values, (1, 2, 3), has_aux=True), static_argnums=0)
    return moe.spec, lambda schedule: run(schedule, {n: a[...] for n, a in moe.router.items()}, weights, x)


@cache
def unplanned(place, layout, router=TopK(2)):
    return jax.device_get(layer(place, layout, router)[1](None))


def assert_equal(found, wanted, tolerance=1e-10):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-6), jax.tree_util.keystr(path)


def layer_plan(place, layout, kind="pipemoe", degrees=Degrees(2, 2), router=TopK(2), **options):
    spec, _ = layer(place, layout, router)
    how = {name: options.pop(name) for name in ("chunk", "hierarchical") if name in options}
    return SCHEDULES[kind](moe_block(spec, B, S, links={"c": "intra"}, **how), CPU, degrees, **options)


CASES = [   # place, layout, degrees, options
    ("alone", "slots", Degrees(3, 2), {}),
    ("expert", "slots", Degrees(2, 4), {"saved": ("x",)}),
    ("all", "slots", Degrees(2, 3), {}),
    ("all", "ragged", Degrees(2, 2), {}),
    ("alone", "ragged", Degrees(4, 4, 4, 4), {"chunk": "sequence"}),
]
MORE = [
    ("fsdp", "slots", Degrees(1, 2), {"slices": 2}),
    ("expert-shard", "slots", Degrees(7, 4), {"saved": ("x", "rows", "hidden")}),
    ("expert", "ragged", Degrees(3, 3), {"saved": ("x",)}),
    ("expert-shard", "ragged", Degrees(4, 4), {}),
    ("alone", "slots", Degrees(4, 4, 4, 4), {"chunk": "batch"}),
]


@pytest.mark.parametrize(("place", "layout", "degrees", "options"), [
    *CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_case_34_planned_layer_equals_the_unplanned(place, layout, degrees, options):
    made = layer_plan(place, layout, degrees=degrees, **options)
    assert_equal(layer(place, layout)[1](made), unplanned(place, layout))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["slots", "ragged"])
def test_case_34_every_chunk_count(place, layout, chunks):
    made = layer_plan(place, layout, degrees=Degrees(chunks, chunks))
    assert_equal(layer(place, layout)[1](made), unplanned(place, layout))


@pytest.mark.parametrize(("place", "layout"), [
    ("node, gpu", "slots"), ("three axes", "ragged"),
    pytest.param("gpu, node", "slots", marks=pytest.mark.slow),
    pytest.param("node, gpu", "ragged", marks=pytest.mark.slow),
    pytest.param("three axes", "slots", marks=pytest.mark.slow),
])
def test_all_to_alls_in_two_steps_move_the_same(place, layout):
    made = layer_plan(place, layout, "fsmoe", hierarchical=True)
    links = {t.verb: t.streams for t in made.graph.forward.tasks if t.is_collective}
    assert links["dispatch_within"] == links["combine_within"] == ("intra",)
    assert links["dispatch"] == links["combine"] == ("inter",)
    assert_equal(layer(place, layout)[1](made), unplanned(place, layout))


def test_two_steps_need_two_links():
    with pytest.raises(ValueError, match="schedule.hierarchical needs experts over axes of both links, got d"):
        layer_plan("expert", "slots", hierarchical=True)


def test_noise_and_plans_agree():
    router = NoisyTopK(2)
    made = layer_plan("expert", "slots", router=router)
    assert_equal(layer("expert", "slots", router)[1](made), unplanned("expert", "slots", router))


def test_a_plan_edited_by_hand_runs_and_gives_the_same_numbers():
    made = layer_plan("expert", "slots")
    tree = json.loads(made.to_json())
    order, spans = tree["backward"], {s["task"] for s in tree["backward_spans"]}
    one, two = "experts_down.0.0@0:dw", "experts_up.0.0@0:dw"
    assert not spans & {one, two}
    i, j = order.index(one), order.index(two)
    order[i], order[j] = order[j], order[i]
    tree["backward_spans"] = []
    edited = Plan.from_json(json.dumps(tree))
    assert edited.backward != made.backward
    assert_equal(layer("expert", "slots")[1](edited), unplanned("expert", "slots"))


def test_no_barriers_no_difference():
    made = replace(layer_plan("expert", "slots"), barriers=False)
    assert_equal(layer("expert", "slots")[1](made), unplanned("expert", "slots"))


def test_schedule_by_name_and_what_it_refuses():
    x = jnp.ones((2, 4, D))
    moe = MoE(D, F, E, schedule="pipemoe", rngs=nnx.Rngs(0), dtype=jnp.float64)
    plain = MoE(D, F, E, rngs=nnx.Rngs(0), dtype=jnp.float64)
    run = nnx.jit(lambda layer, x: layer(x)[0])
    np.testing.assert_allclose(run(moe, x), run(plain, x), rtol=1e-12)
    with pytest.raises(ValueError, match="schedule must be None, a Plan or one of .*, got 'pipe'"):
        MoE(D, F, E, schedule="pipe", rngs=nnx.Rngs(0))(x)
    with pytest.raises(ValueError, match="needs a router that sends whole tokens, got Soft"):
        MoE(D, F, E, router=Soft(), schedule="pipemoe", rngs=nnx.Rngs(0))(x)
    made = layer_plan("alone", "slots")
    with pytest.raises(ValueError, match="the plan is for 8 sequences of 8 tokens on a device; the layer got 2 of 4"):
        MoE(D, F, E, schedule=made, rngs=nnx.Rngs(0))(x)


# Stacks of blocks with attention, shared experts, packed documents and padding.

MESHES = {
    "alone": ({"d": 1}, {}),
    "one device": ({"d": 1, "e": 1}, {"data": ["d"], "expert": ["d"], "fsdp": ["d"], "model": ["e"]}),
    "expert": ({"d": 8}, {"data": ["d"], "expert": ["d"]}),
    "expert+fsdp": ({"d": 8}, {"data": ["d"], "expert": ["d"], "fsdp": ["d"]}),
    "all": ({"a": 2, "b": 2, "c": 2},
            {"data": ["a", "b"], "expert": ["b"], "expert_shard": ["c"], "model": ["c"], "fsdp": ["a"]}),
}


def config(place, layout, layers, schedule=None, remat="none"):
    axes, parallel = MESHES[place]
    return from_dict({
        "mesh": {"axes": axes}, "parallel": parallel, "schedule": schedule or {},
        "model": {"layers": layers, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 16, "seq": 16, "vocab": 64,
                  "scan": True},
        "moe": {"d_ff": 16, "shared_experts": 1, "dispatch": {"kind": layout},
                "router": {"score": "sigmoid", "bias_update_rate": 0.1}},
        "train": {"batch": 16, "remat": remat},
    })


@nnx.jit
def loss_and_gradients(model, tokens, mask, segments):
    def loss(model):
        y, aux = model(tokens, mask, segments)
        y = jnp.where(mask[..., None], y, 0)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() + sum(aux.losses.values()), aux

    (value, aux), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    return value, aux, nnx.to_pure_dict(nnx.state(grads))


@cache
def model_values(place, layout, layers, schedule=None, remat="none", saved=None):
    cfg = config(place, layout, layers, None if schedule is None else dict(schedule), remat)
    model = DecoderLM(cfg, mesh_of(MESHES[place][0]), nnx.Rngs(0), jnp.float64)
    model.blocks[0].ffn.bias[...] = jnp.asarray(np.random.default_rng(2).normal(size=(layers, 8)) * 0.1)
    if schedule is not None:
        model.plan = plan_of(cfg, "cpu-8")
    if saved is not None:
        model.plan = SCHEDULES["pipemoe"](model.plan.block, CPU, model.plan.degrees, saved=saved)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 64, (16, 16)))
    segments = jnp.asarray(np.repeat([[0] * 9 + [1] * 7], 16, 0))
    return jax.device_get(loss_and_gradients(model, tokens, jnp.asarray(rng.random((16, 16)) < 0.9), segments))


def pipemoe(forward, backward, dense=1, **options):
    degrees = FrozenDict(moe_forward=forward, moe_backward=backward, dense_forward=dense, dense_backward=dense)
    return (("kind", "pipemoe"), ("degrees", degrees), *options.items())


class FrozenDict(dict):
    def __hash__(self):
        return hash(tuple(self.items()))


@pytest.mark.slow
@pytest.mark.parametrize("saved", less_saved(SAVED), ids=len)
def test_whatever_is_saved_makes_no_difference(saved):
    """Sets that the planner may choose under a memory limit."""
    assert_equal(model_values("alone", "slots", 2, pipemoe(2, 2), saved=saved), model_values("alone", "slots", 2))


@pytest.mark.parametrize(("place", "layout", "layers", "schedule", "remat"), [
    ("all", "slots", 2, pipemoe(2, 4, slices=2), "full"),
    ("one device", "slots", 2, pipemoe(2, 2), "none"),
    pytest.param("expert", "slots", 4, pipemoe(2, 4, segment=2, slices=3), "none", marks=pytest.mark.slow),
    pytest.param("alone", "slots", 4, pipemoe(2, 2, 4, chunk="batch"), "none", marks=pytest.mark.slow),
    pytest.param("alone", "ragged", 4, pipemoe(4, 4, 2, chunk="sequence", segment=2), "none", marks=pytest.mark.slow),
    pytest.param("expert", "ragged", 4, pipemoe(2, 2), "dots", marks=pytest.mark.slow),
    pytest.param("expert+fsdp", "slots", 4, pipemoe(3, 1, slices=4), "none", marks=pytest.mark.slow),
    pytest.param("all", "ragged", 4, pipemoe(2, 2, segment=4), "none", marks=pytest.mark.slow),
    pytest.param("expert", "slots", 4, (("kind", "sequential"),), "full", marks=pytest.mark.slow),
])
def test_planned_stack_equals_the_unplanned(place, layout, layers, schedule, remat):
    assert_equal(model_values(place, layout, layers, schedule, remat), model_values(place, layout, layers))


@pytest.mark.parametrize(("schedule", "model", "message"), [
    ({"kind": "pipemoe"}, {}, "model.scan must be true for a planned schedule"),
    ({"kind": "pipemoe", "segment": 3}, {"scan": True}, "schedule.segment must divide model.layers=4, got 3"),
    ({"kind": "pipe"}, {}, "schedule.kind"),
    ({"kind": "fsmoe", "candidates": 2}, {"scan": True}, 'schedule.candidates must be 1 .*, got 2 with .*fsmoe'),
    ({"kind": "plain", "profile": True}, {}, 'schedule.profile must be false .*, got true with schedule.kind="plain"'),
    ({"kind": "auto", "candidates": 2, "plan": "p.json"}, {"scan": True}, "got 2 with schedule.plan"),
    ({"kind": "pipemoe"}, {"scan": True, "moe_every": 2}, "model.moe_every must be 1 for a planned schedule"),
])
def test_config_of_schedules(schedule, model, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({"schedule": schedule, "model": model})
