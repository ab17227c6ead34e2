"""Plans as data: graphs, orders, JSON, schedules, and what is refused."""

import json
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxmoe import Roles
from jaxmoe.config import from_dict
from jaxmoe.plan.backward import reductions
from jaxmoe.plan.block import SAVED, Block, pieces
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.cost import seconds
from jaxmoe.plan.forward import cover
from jaxmoe.plan.graph import task_graph
from jaxmoe.plan.plan import Plan
from jaxmoe.plan.schedules import SCHEDULES
from jaxmoe.plan.simulate import simulate
from jaxmoe.plan.tasks import Degrees, Task
from jaxmoe.planned import layer_plan
from jaxmoe.planning import block_of, plan
from jaxmoe.spec import Spec

pytestmark = pytest.mark.core
H100 = load_cluster("8x8-h100")
MESH = AbstractMesh((8, 8), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
ROLES = {
    "expert": {"data": ["node", "gpu"], "expert": ["node"]},
    "expert+shard": {"data": ["node", "gpu"], "expert": ["node"], "expert_shard": ["gpu"]},
    "two axes": {"data": ["node", "gpu"], "expert": ["node", "gpu"]},
    "model": {"data": ["node"], "expert": ["node"], "expert_shard": ["gpu"], "model": ["gpu"]},
    "fsdp": {"data": ["node", "gpu"], "expert": ["node"], "fsdp": ["gpu"]},
}


@cache
def block(roles="expert+shard", dispatch="slots", chunk="slots", shared=1) -> Block:
    cfg = from_dict({
        "mesh": {"axes": {"node": 8, "gpu": 8}}, "parallel": ROLES[roles],
        "model": {"layers": 4, "d_model": 1024, "heads": 16, "kv_heads": 8, "seq": 1024, "scan": True},
        "moe": {"num_experts": 64, "d_ff": 2048, "shared_experts": shared, "dispatch": {"kind": dispatch}},
        "schedule": {"kind": "pipemoe", "segment": 2, "chunk": chunk},
        "train": {"batch": 128, "precision": "bfloat16"},
    })
    return block_of(cfg, H100)


@pytest.mark.parametrize(("roles", "dispatch", "changes"), [
    *((roles, dispatch, {}) for roles, dispatch in product(ROLES, ("slots", "ragged"))),
    *(("model", "slots", {"split": "slots", "fused": fused}) for fused in (False, True))], ids=str)
def test_every_value_is_written_once_before_it_is_read(roles, dispatch, changes):
    degrees = Degrees(2, 2) if dispatch == "ragged" else Degrees(2, 4)
    graph = task_graph(replace(block(roles, dispatch=dispatch), **changes), degrees, SAVED, 3)
    inputs = {v for t in graph.forward.tasks for v in t.reads} - set(graph.forward.writers)
    assert {v.partition("@")[0] for v in inputs if not v.startswith("p:")} == {"x.0"}
    assert all(len(w) == 1 for w in graph.forward.writers.values())
    forward = {v for t in graph.again.tasks for v in (*t.reads, *t.writes)}
    for task in graph.backward.tasks:
        for v in task.reads:
            known = v in graph.backward.writers or v.startswith(("d:x.0@2", "d:aux", "pending:", "p:"))
            assert known or v in forward, f"{task.name} reads {v}"


@pytest.mark.parametrize("saved", [SAVED, ("x",), ("x", "q", "k", "v", "hidden")], ids=len)
def test_what_is_not_saved_is_recomputed(saved):
    graph = task_graph(block(), Degrees(2, 2), saved, 1)
    again = [t for t in graph.backward.tasks if t.direction == "recompute"]
    made = {v for t in again for v in t.writes}
    kept = {v for t in graph.backward.tasks for v in t.reads} - set(graph.backward.writers)
    families = {v.partition("@")[0].partition(".")[0] for v in kept if ":" not in v}
    assert families <= set(saved) | {"x"}
    assert not {v.partition("@")[0].partition(".")[0] for v in made} & set(saved)
    assert not [t for t in again if t.verb == "unpack" and t.layer == 1], "nothing reads the segment's result again"


def test_all_flops_of_the_backward_pass_are_twice_the_forward_ones():
    graph = task_graph(block(shared=0), Degrees(4, 2), SAVED, 1)
    forward, backward = (sum(t.flops for t in p.tasks if t.verb not in ("attend", "route"))
                         for p in (graph.forward, graph.backward))
    assert backward == pytest.approx(2 * forward)


@pytest.mark.parametrize("degrees", [Degrees(1, 1), Degrees(4, 8)], ids=str)
def test_bytes_do_not_depend_on_the_degree(degrees):
    graph = task_graph(block(), degrees, SAVED, 1)
    for kind in ("all_to_all", "all_gather", "reduce_scatter"):
        forward, backward = (sum(t.bytes for t in p.tasks if t.kind == kind) for p in (graph.forward, graph.backward))
        one = sum(t.bytes for t in task_graph(block(), Degrees(), SAVED, 1).forward.tasks if t.kind == kind)
        assert forward == pytest.approx(one)
        assert kind != "all_to_all" or backward == pytest.approx(one)


@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_slices_hold_every_gradient_once(slices):
    made = block(shared=0)
    found = pieces(made, slices)
    assert len(found) == slices
    for param in made.params:
        rows = sorted((p.lo, p.hi) for parts in found for p in parts if p.param == param)
        if made.size((*param.gather, *param.reduce)) > 1:
            assert rows[0][0] == 0 and rows[-1][1] == (param.shape[0] if param.shape else 1)
            assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))
    sizes = [sum((p.hi - p.lo) * p.param.size / p.param.shape[0] for p in parts if p.param.shape) for parts in found]
    assert max(sizes) < 1.2 * sum(sizes) / len(sizes) + 1024 * 1024


@pytest.mark.parametrize("roles", ROLES)
def test_reductions_count_bytes_by_collective_and_link(roles):
    made = block(roles)
    want: dict[tuple[str, tuple[str, ...]], float] = {}
    for param in made.params:
        ways, nbytes = made.size(param.gather), 4.0 * param.size
        if ways > 1:
            at = ("reduce_scatter", made.streams(param.gather))
            want[at] = want.get(at, 0) + nbytes * (ways - 1) / ways
        if (n := made.size(param.reduce)) > 1:
            at = ("all_reduce", made.streams(param.reduce))
            want[at] = want.get(at, 0) + 2 * nbytes / ways * (n - 1) / n
    for slices in (1, 3):
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for task in reductions(replace(made, segment=1), slices).tasks:
            assert task.bytes == pytest.approx(sum(p.bytes for p in task.parts))
            assert set(task.streams) == {s for p in task.parts for s in p.streams}
            for p in task.parts:
                found[p.kind, p.streams] = found.get((p.kind, p.streams), 0) + p.bytes
        assert found == pytest.approx(want)


def test_bytes_between_nodes_are_those_of_the_group():
    """Two of a node's eight devices in a group: a ring enters the node once, and half of its bytes do."""
    made = Block(1, 8, 8, 8, 8, 1, 8, axes=(("node", 8), ("dp", 2), ("tp", 4)),
                 links=(("node", "inter"), ("dp", "intra"), ("tp", "intra")))
    assert made.between("all_reduce", ("node", "dp")) == 1 / 2
    assert made.between("all_gather:x3p", ("node", "dp", "tp")) == 1 / 8
    assert made.between("all_to_all", ("node", "dp")) == 14 / 15
    assert made.between("all_to_all", ("node",)) == 1
    cluster = load_cluster("8x8-h100")
    one, half = (Task("t", "t", ("intra", "inter"), (), (), "all_reduce", bytes=1e9, between=b) for b in (1.0, 0.5))
    alpha = cluster.collective("inter", "all_reduce").alpha_seconds + cluster.device.launch_seconds
    assert seconds(half, cluster) - alpha == pytest.approx((seconds(one, cluster) - alpha) / 2)


def test_steps_of_shared_slots_that_cross_nodes_say_so():
    """Experts within a node, their parts in others: all messages of a step but one cross."""
    cfg = {"mesh": {"axes": {"node": 2, "gpu": 4}}, "parallel": {"data": ["node"], "expert": ["gpu"], "expert_shard": [
        "node"], "model": ["gpu"]}, "model": {"layers": 1, "scan": True, "kv_heads": 4}, "moe": {"num_experts": 8},
        "schedule": {"kind": "parm-s2"}, "train": {"batch": 8}}
    made = replace(block_of(from_dict(cfg), H100), split="slots", fused=True)
    steps = [t for t in task_graph(made, Degrees(), (), 1).forward.tasks if t.verb == "combine"]
    assert [t.streams for t in steps] == [("inter",), *[("intra", "inter")] * 3]
    assert {t.between for t in steps[1:]} == {made.between("all_to_all", ("gpu", "node"))}


@pytest.mark.parametrize(("part", "parts", "others", "want"), [
    (0, 1, 4, [0, 1, 2, 3]), (1, 2, 4, [2, 3]), (3, 4, 2, [1]), (2, 4, 4, [2]), (0, 8, 1, [0])])
def test_cover(part, parts, others, want):
    assert list(cover(part, parts, others)) == want


@pytest.mark.parametrize("kind", ["sequential", "pipemoe"])
@pytest.mark.parametrize("roles", ROLES)
def test_plans_survive_json_and_are_no_faster_than_their_bound(kind, roles):
    made = SCHEDULES[kind](block(roles), H100)
    assert Plan.from_json(made.to_json()) == made
    assert hash(Plan.from_json(made.to_json())) == hash(made)
    timeline = simulate(made, H100)
    assert timeline.makespan >= timeline.bound_seconds * (1 - 1e-9)


def test_pipemoe_is_faster_and_cuts_forward_and_backward_apart():
    made = block()
    takes = {kind: simulate(SCHEDULES[kind](made, H100), H100, contention=False).makespan
               for kind in ("sequential", "pipemoe")}
    assert takes["pipemoe"] < takes["sequential"]
    forced = SCHEDULES["pipemoe"](made, H100, Degrees(2, 8))
    assert sum(t.verb == "dispatch" for t in forced.graph.forward.tasks) == 2 * 2
    assert sum(t.verb == "dispatch" for t in forced.graph.backward.tasks if t.of) == 2 * 8


def edited(made, **changes):
    return json.dumps(json.loads(made.to_json()) | changes)


def test_broken_plans_are_refused_with_the_tasks_named():
    made = layer_plan("pipemoe", Spec(64, 64, 8, mesh=MESH, roles=Roles(("node", "gpu"), ("node",))), 64, 64)
    order = list(made.forward)
    swapped = [{"route.0@0": "pack.0@0", "pack.0@0": "route.0@0"}.get(n, n) for n in order]
    for changes, message in (
        ({"forward": swapped}, "task 'pack.0@0' must come after task 'route.0@0'"),
        ({"forward": order[:-1]}, f"task '{order[-1]}' is missing"),
        ({"forward": [*order, order[-1]]}, f"'{order[-1]}' twice"),
        ({"forward": [*order[:-1], "nonsense.0@0"]}, "names task 'nonsense.0@0', which the plan's graph does not have"),
        ({"forward_spans": [{"task": "dispatch.0.0@0", "first": "experts_up.0.0@0", "last": "experts_up.0.0@0"}]},
         "'experts_up.0.0@0' reads the result of 'dispatch.0.0@0' before the end of its span"),
        ({"version": 99}, "plan version must be 1, got 99"),
        ({"colour": "red"}, "a plan has no key 'colour'"),
        ({"degrees": {"moe_forward": 0}}, "schedule.degrees.moe_forward must be a positive integer, got 0"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            Plan.from_json(edited(made, **changes))
    tree = json.loads(made.to_json())
    with pytest.raises(ValueError, match="chunk of a block must be one of slots, batch, sequence, got 'Sequence'"):
        Plan.from_json(edited(made, block=tree["block"] | {"chunk": "Sequence"}))
    with pytest.raises(ValueError, match="must be JSON"):
        Plan.from_json("{")


def test_a_plan_for_other_shapes_is_refused(tmp_path):
    tree = {"mesh": {"axes": {"node": 8, "gpu": 8}}, "parallel": {"data": ["node", "gpu"], "expert": ["node"]},
            "model": {"layers": 2, "scan": True}, "schedule": {"kind": "pipemoe"}, "train": {"batch": 64}}
    made = plan(from_dict(tree))
    (tmp_path / "plan.json").write_text(made.to_json())
    saved = {"schedule": {"kind": "plain", "plan": str(tmp_path / "plan.json")}}
    assert plan(from_dict(tree | saved)) == made
    untied = {"schedule": saved["schedule"] | {"barriers": False}}
    assert plan(from_dict(tree | untied)) == replace(made, barriers=False)
    coded = tree | saved | {"train": {"batch": 64, "precision": "bfloat16"}}
    (tmp_path / "plan.json").write_text(plan(from_dict(coded | {"schedule": tree["schedule"], "codec": {
        "dispatch": "x3p"}})).to_json())
    with pytest.raises(ValueError, match="was made for codec.dispatch 'x3p', but this run has 'off'"):
        plan(from_dict(coded | {"codec": {"gradients": "auto"}}))
    (tmp_path / "plan.json").write_text(made.to_json())
    with pytest.raises(ValueError, match="was made for batch 1, but this run has 2"):
        plan(from_dict(tree | saved | {"train": {"batch": 128}}))
    with pytest.raises(ValueError, match="cannot be read"):
        plan(from_dict(tree | {"schedule": {"plan": "nowhere.json"}}))


@pytest.mark.parametrize(("change", "degrees", "message"), [
    ({}, Degrees(2, 2, 2, 2), "dense_forward must be 1 for chunks along slots, got 2"),
    ({"chunk": "batch"}, Degrees(2, 4, 2, 2), "forward and backward must be equal for chunks along the batch"),
    ({"chunk": "batch"}, Degrees(3, 3, 1, 1), "moe_forward must divide the device's 2 .*, got 3"),
    ({"layout": "ragged"}, Degrees(2, 4), "moe_forward and moe_backward must be equal for ragged .*, got 2 and 4"),
])
def test_degrees_that_do_not_fit(change, degrees, message):
    with pytest.raises(ValueError, match=message):
        task_graph(replace(block(), **change), degrees, SAVED, 1)


def test_sequence_chunks_must_drop_nothing():
    with pytest.raises(ValueError, match="chunks along the sequence must drop nothing"):
        block(chunk="sequence")
    assert block(chunk="sequence", dispatch="ragged").chunk == "sequence"


def test_unknown_schedule():
    with pytest.raises(ValueError, match="schedule must be None, a Plan or one of .*, got 'fastest'"):
        layer_plan("fastest", Spec(64, 64, 8), 8, 8)
