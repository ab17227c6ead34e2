"""Training with coded collectives: the same bits as uncoded ones, counted; and where costs say that coding pays."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe.config import ConfigError, from_dict
from jaxmoe.plan import codec_policy
from jaxmoe.plan.cluster import AlphaBeta, load_cluster
from jaxmoe.plan.graph import task_graph
from jaxmoe.plan.plan import Plan
from jaxmoe.plan.schedules import SCHEDULES
from jaxmoe.plan.tasks import Degrees, Part
from jaxmoe.planning import block_of, codec_choices, compare, plan
from jaxmoe.training.step import compiled_step, init_state
from jaxmoe.types import TENSOR_CLASSES

H100 = load_cluster("8x8-h100")
CONFIG = {
    "mesh": {"axes": {"node": 2, "gpu": 4}},
    "parallel": {"data": ["node", "gpu"], "expert": ["gpu"], "fsdp": ["node"]},
    "model": {"layers": 1, "d_model": 128, "heads": 4, "kv_heads": 2, "seq": 128, "scan": True},
    "moe": {"d_ff": 256, "dispatch": {"kind": "slots", "capacity_factor": 1.0}},
    "schedule": {"kind": "pipemoe", "degrees": {}},
    "train": {"precision": "bfloat16", "batch": 8, "steps": 200, "warmup_steps": 10, "learning_rate": 2e-3},
}


def config(tree=CONFIG, **sections):
    return from_dict(tree | {name: tree.get(name, {}) | values for name, values in sections.items()})


def batches(steps, vocab=256):
    """Text-like: a token is often the one before it plus one."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, vocab, (steps, 8, 1))
    jumps = np.where(rng.random((steps, 8, 128)) < 0.8, 1, rng.integers(0, vocab, (steps, 8, 128)))
    return (np.concatenate([start, jumps], 2).cumsum(2) % vocab).astype(np.int32)


@cache
def trained(steps, layers, codec):
    """Metrics of each step, the final state, and how many coded collectives of each class a step has."""
    cfg = config(codec={"kind": codec}, model={"layers": layers})
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    model, optimizer = init_state(cfg, mesh)
    step = compiled_step(cfg, model, optimizer)
    metrics = [jax.device_get(step(batch)) for batch in batches(steps)]
    # Forward and backward; two sets of parameters are gathered; gradients are scattered, then reduced
    counts = {"dispatch": 2 * layers, "combine": 2 * layers, "parameters": 4 * layers, "gradients": 2 * layers}
    return metrics, jax.device_get(jax.tree.leaves(nnx.state((model, optimizer)))), counts


def sums(metrics, field, name):
    return sum(float(m[f"codec_{field}_{name}"]) for m in metrics)


def check_same_bits(steps, layers, arrived):
    """Of "x3p" and the same tasks with bytes as they are: losses, parameters and optimizer state; and the counters.

    arrived: classes of which some collectives arrive coded.
    """
    coded, coded_state, counts = trained(steps, layers, "x3p")
    raw, raw_state, _ = trained(steps, layers, "raw")
    for one, other in zip(coded, raw, strict=True):
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
    for one, other in zip(coded_state, raw_state, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    for name in TENSOR_CLASSES:
        assert sums(coded, "raw_bytes", name) == sums(raw, "raw_bytes", name) == sums(raw, "wire_bytes", name) > 0
        assert sums(raw, "fallbacks", name) == 0
        assert sums(coded, "fallbacks", name) < steps * counts[name] or name not in arrived
        fullest = max(float(m[f"codec_pool_used_{name}"]) for m in coded)
        assert (fullest > 1) == (sums(coded, "fallbacks", name) > 0) and fullest > 0
    assert sums(coded, "fallbacks", "parameters") == 0
    assert sums(coded, "wire_bytes", "parameters") < 0.8 * sums(raw, "wire_bytes", "parameters")


def test_steps_are_the_same_bits():
    check_same_bits(3, 1, ("parameters",))   # others fall back in the first steps


@pytest.mark.slow
def test_only_what_goes_between_nodes_is_coded():
    """Experts over both links: the step within nodes sends bytes as they are, and all bits arrive."""
    states = []
    for kind in ("x3p", "raw"):
        cfg = config(parallel={"expert": ["node", "gpu"]}, codec={"kind": "off", "dispatch": kind, "combine": kind},
                     schedule={"kind": "fsmoe", "hierarchical": True, "degrees": {"moe_forward": 2}})
        mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
        model, optimizer = init_state(cfg, mesh)
        kinds = {t.verb: t.kind for t in model.plan.graph.forward.tasks}
        assert kinds["dispatch_within"] == "all_to_all" and kinds["encode_dispatch"] == f"encode:{kind}"
        step = compiled_step(cfg, model, optimizer)
        metrics = [jax.device_get(step(batch)) for batch in batches(3)]
        states.append((metrics, jax.device_get(jax.tree.leaves(nnx.state((model, optimizer))))))
    (coded, state), (raw, same) = states
    assert [m["loss"] for m in coded] == [m["loss"] for m in raw]
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(state, same, strict=True))
    assert sums(coded, "raw_bytes", "dispatch") == sums(raw, "wire_bytes", "dispatch") > 0


OVER_BOTH = {"data": ["node", "gpu"], "expert": ["gpu"], "fsdp": []}
STORED_OVER_BOTH = {"data": ["node", "gpu"], "expert": [], "fsdp": ["node", "gpu"]}


def reduced_and_gathered(parallel, kind):
    """Parts of the collectives of gradients and parameters of one layer, by link."""
    graph = plan(config(parallel=parallel, codec={"kind": kind}), H100).graph
    found = {"intra": 0.0, "inter": 0.0}
    for task in (*graph.tail.tasks, *(t for t in graph.forward.tasks if t.verb == "param_gather" and t.is_collective)):
        for part in task.parts or (Part(task.kind, task.streams, task.bytes),):
            for stream in part.streams:
                found[stream] += part.bytes
    return found


@pytest.mark.parametrize("parallel", (OVER_BOTH, STORED_OVER_BOTH), ids=("reduced", "stored"))
def test_gathers_and_reductions_are_coded_between_nodes(parallel):
    """Within nodes they are as large as uncoded ones; between nodes each sends what its format leaves of one part."""
    raw, coded = (reduced_and_gathered(parallel, kind) for kind in ("raw", "x3p"))
    assert coded["intra"] == raw["intra"] > 0
    assert 0 < coded["inter"] < 0.95 * raw["inter"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", (OVER_BOTH, STORED_OVER_BOTH), ids=("reduced", "stored"))
def test_what_is_coded_between_nodes_has_the_same_bits_and_the_plans_bytes(parallel):
    states = []
    for kind in ("x3p", "raw"):
        cfg = config(parallel=parallel, codec={"kind": "off", "parameters": kind, "gradients": kind})
        mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
        model, optimizer = init_state(cfg, mesh)
        step = compiled_step(cfg, model, optimizer)
        metrics = [jax.device_get(step(batch)) for batch in batches(3)]
        states.append((metrics, jax.device_get(jax.tree.leaves(nnx.state((model, optimizer))))))
    (coded, state), (raw, same) = states
    assert [m["loss"] for m in coded] == [m["loss"] for m in raw]
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(state, same, strict=True))
    sent = sum(p.bytes for t in model.plan.graph.tail.tasks for p in t.parts if p.streams == ("inter",))
    assert np.isclose(sums(raw, "wire_bytes", "gradients"), 3 * sent, rtol=1e-4)   # but for padding


@pytest.mark.slow
def test_two_hundred_steps_are_the_same_bits():
    check_same_bits(200, 2, TENSOR_CLASSES)


def at_rate(seconds_per_byte, links=("inter", "intra")):
    """The H100 cluster with other links."""
    cost = AlphaBeta(origin="ours", alpha_seconds=3e-5, seconds_per_byte=seconds_per_byte)
    kinds = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    return H100.model_copy(update={link: getattr(H100, link).model_copy(update=dict.fromkeys(kinds, cost))
                                   for link in links})


LARGE = config(parallel={"expert": ["node"]}, model={"d_model": 1024, "seq": 4096}, moe={"d_ff": 4096},
               codec={"kind": "auto"})


@pytest.mark.parametrize(("seconds_per_byte", "codec"), ((1e-10, "x3p"), (2e-12, None)), ids=("slow", "fast"))
def test_auto_codes_on_slow_links_only(seconds_per_byte, codec):
    choices = {c.tensors: c for c in codec_choices(LARGE, at_rate(seconds_per_byte))}
    for name in ("dispatch", "combine"):
        assert choices[name].codec == codec
        assert (choices[name].seconds["x3p"] < choices[name].seconds["off"]) == (codec is not None)
    assert (choices["gradients"].codec is not None) == (codec is not None)
    assert plan(LARGE, at_rate(seconds_per_byte)).block.codec == codec_policy.codec_of(tuple(choices.values()))


def test_auto_plans_without_coding_where_that_hides_less():
    """Here dispatch and combine would take less time coded, but they are hidden, which coding is not."""
    cluster = at_rate(2e-11)
    product = cluster.matmul.model_copy(update={"seconds_per_flop": 30 * cluster.matmul.seconds_per_flop})
    cluster = cluster.model_copy(update={"matmul": product})
    auto = config(LARGE.model_dump(), schedule={"kind": "auto"}, model={"layers": 4})
    choices = codec_choices(auto, cluster)
    assert all(c.codec for c in choices)
    made, seconds = compare(auto, cluster)
    assert {n for n, _ in made.block.codec} == {"parameters", "gradients"}
    asked = {c.tensors: c.codec for c in choices}
    for kinds in (asked, dict.fromkeys(TENSOR_CLASSES, "off")):
        _, others = compare(config(auto.model_dump(), codec=kinds), cluster)
        assert seconds["auto"] < min(others.values())
    shown = {c.tensors: c for c in codec_policy.as_planned(choices, made.block)}
    assert shown["dispatch"].codec is None and shown["dispatch"].why == "as the plan has it"
    assert shown["gradients"] in choices


def test_auto_leaves_gradients_alone_that_stay_within_nodes():
    """Most are of experts, of which every node holds others."""
    choices = {c.tensors: c.codec for c in codec_choices(LARGE, at_rate(1e-10, ("inter",)))}
    assert choices["dispatch"] == "x3p" and choices["gradients"] is None


@pytest.mark.parametrize(("width", "codec"), ((1024, "x3p"), (640, None)))
def test_auto_codes_rows_of_whole_blocks_only(width, codec):
    cfg = config(LARGE.model_dump(), model={"d_model": width})
    choices = {c.tensors: c for c in codec_choices(cfg, at_rate(1e-10))}
    assert choices["dispatch"].codec == choices["combine"].codec == codec and choices["parameters"].codec
    assert ("whole blocks of 256" in choices["dispatch"].why) == (codec is None)


def test_auto_is_off_without_rates_and_for_small_messages():
    silent = H100.model_copy(update={"codecs": {}})
    for cfg, cluster, why in ((LARGE, silent, "no rates"), (config(codec={"kind": "auto"}), H100, "longer"),
                              (config(LARGE.model_dump(), codec={"min_bytes": 2**40}), at_rate(1e-10), "min_bytes")):
        choices = codec_choices(cfg, cluster)
        assert all(c.codec is None for c in choices)
        assert why in " ".join(c.why for c in choices)


def test_classes_are_chosen_apart():
    cfg = config(codec={"kind": "x3p", "dispatch": "x4s", "gradients": "x3p:as-bf16", "combine": "off"})
    assert plan(cfg, H100).block.codec == (("dispatch", "x4s"), ("parameters", "x3p"), ("gradients", "x3p:as-bf16"))


def test_coding_surrounds_exchanges_as_the_order_theorem_says():
    made = plan(config(LARGE.model_dump(), codec={"kind": "x4s"}), at_rate(1e-10))
    block = replace(made.block, bytes_per_value=2)
    made = SCHEDULES["pipemoe"](block, H100, Degrees(3, 3))
    compute = [n.partition("@")[0] for n in made.forward if n.startswith(("encode", "experts", "decode"))]
    rounds = [f"{verb}.0.{i}" for i in range(3) for verb in ("decode_dispatch", "experts_up", "experts_down",
                                                             "encode_combine")]
    assert compute == [*(f"encode_dispatch.0.{i}" for i in range(3)), *rounds,
                       *(f"decode_combine.0.{i}" for i in range(3))]
    assert {t.kind for t in made.graph.backward.tasks if "code_" in t.verb} == {"encode:x4s", "decode:x4s"}
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("kind", ("pipemoe", "fsmoe", "mast", "parm-s1"))
def test_schedules_order_coding_around_split_experts(kind):
    split = {"data": ["node"], "expert": ["node"], "expert_shard": ["gpu"], "fsdp": []}
    cfg = config(LARGE.model_dump(), parallel=split, schedule={"kind": kind, "degrees": {"moe_forward": 4,
                 "moe_backward": 4}}, codec={"kind": "x4s"})
    forward = plan(cfg, H100).forward
    if kind == "mast":   # it searches for an order
        return
    assert forward.index("encode_dispatch.0.3@0") < forward.index("decode_dispatch.0.0@0")
    assert forward.index("experts_up.0.0@0") < forward.index("decode_dispatch.0.2@0")


def test_wire_bytes_are_the_plans():
    block = block_of(LARGE, H100)
    raw, coded = (next(t for t in task_graph(replace(block, codec=codec), Degrees(), (), 1).forward.tasks
                       if t.verb == "dispatch").bytes for codec in ((), (("dispatch", "x4s"),)))
    assert 1.29 < raw / coded < 1.31


@pytest.mark.parametrize(("sections", "words"), (
    (dict(schedule={"kind": "plain"}, codec={"kind": "x4s"}), 'codec.kind="x4s" needs a planned schedule'),
    (dict(train={"precision": "float32"}, codec={"dispatch": "x4s"}), 'codec.dispatch="x4s" needs train.precision'),
    (dict(codec={"combine": "x4s:as-bf16"}), "codec.combine must be without"),
    (dict(codec={"kind": "x5"}), "codec.kind")))
def test_bad_config_is_named(sections, words):
    with pytest.raises(ConfigError, match=words):
        config(**sections)
