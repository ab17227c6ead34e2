"""Programs compiled for GPUs that are not there, against their plans."""

import importlib.util
import json
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxmoe import Roles
from jaxmoe.config import load_config
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.prove import Computation, Flight, Instruction, judge, read
from jaxmoe.plan.schedules import SCHEDULES
from jaxmoe.plan.tasks import Degrees, scope
from jaxmoe.planned import layer_plan, moe_block
from jaxmoe.planning import plan
from jaxmoe.proof import prove, prove_layer
from jaxmoe.spec import Spec

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None,
                                    reason="XLA's compiler for NVIDIA GPUs: pip install 'jaxmoe[prove]'")

TEXT = """
HloModule jit_step, is_scheduled=true

%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %all-to-all-start = ((f32[8]), (f32[8])) all-to-all-start(%x), metadata={op_name="a/task_dispatch.0.1_L0/all_to_all"}
  %gemm_fusion_dot.1 = f32[8]{0} fusion(%x), kind=kCustom, metadata={op_name="a/task_experts_up.0.0_L0/dot_general"}
  %loop_fusion = f32[8]{0} fusion(%gemm_fusion_dot.1), metadata={op_name="a/task_experts_up.0.0_L0/silu"}
  %all-to-all-done = f32[8]{0} all-to-all-done(%all-to-all-start)
  %all-gather-start = (f32[8], f32[16]) all-gather-start(%all-to-all-done), metadata={op_name="a/task_x/all_gather"}, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-gather-done = f32[16]{0} all-gather-done(%all-gather-start)
  ROOT %t = (f32[8]) tuple(%all-to-all-done)
}

ENTRY %main (a: f32[8]) -> (f32[8]) {
  %a = f32[8]{0} parameter(0)
  %in = (f32[8]) tuple(%a)
  %all-reduce = f32[8]{0} all-reduce(%a), to_apply=%add
  ROOT %while = (f32[8]) while(%in), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""   # noqa: E501


def test_reading_a_compiled_program():
    body, entry = read(TEXT)
    assert [(f.task, f.kind, f.is_async, f.times, [i.name for i in f.beside]) for f in body.flights] == [
        ("task_dispatch.0.1_L0", "all-to-all", True, 3, ["gemm_fusion_dot.1", "loop_fusion"]),
        ("task_x", "all-gather", False, 3, []),
    ]
    assert [(f.kind, f.is_async, f.times) for f in entry.flights] == [("all-reduce", False, 1)]
    assert [i.is_product for i in body.order] == [False, True, False, False]
    assert [f.size for f in (*body.flights, *entry.flights)] == [64, 96, 32]


def fake(plan, hidden):
    """A program that does what the plan says, and has a product beside a collective only if `hidden`."""
    def instruction(task):
        op = "fusion" if not task.is_collective else task.kind.replace("_", "-") + "-start"
        return Instruction(f"{'gemm' if task.kind == 'matmul' else op}.{task.name}", op, scope(task), "", False, "")

    flights, order = [], []
    for pass_, names, spans in ((plan.graph.forward, plan.forward, plan.forward_spans),
                                (plan.graph.backward, plan.backward, plan.backward_spans)):
        of = {s.task: s for s in spans}
        for name in names:
            task = pass_.by_name[name]
            order.append(instruction(task))
            if task.is_collective:
                beside = (instruction(pass_.by_name[of[name].first]),) if name in of and hidden else ()
                flights.append(Flight(scope(task), task.kind.replace("_", "-"), True, beside, 1))
    return (Computation(tuple(flights), tuple(order)),)


MESH = AbstractMesh((8, 8), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
SPEC = Spec(4096, 14336, 8, mesh=MESH, roles=Roles(("node", "gpu"), ("node",), ("gpu",)), dtype=jnp.bfloat16)


@cache
def small_plan():
    return layer_plan("pipemoe", SPEC, 64, 4096)


@pytest.mark.parametrize("hidden", [True, False])
def test_judging(hidden):
    made, cluster = small_plan(), load_cluster("8x8-h100")
    report = judge(made, fake(made, hidden), cluster)
    assert report.promised == len(made.forward_spans) + len(made.backward_spans) > 4
    assert report.holds == hidden and bool(report.missing) != hidden
    assert report.order_kept and not report.unplanned
    assert bool(report.bytes_overlapped) == hidden and report.bytes_overlapped <= report.bytes_beside
    assert bool(report.bytes_beside) == hidden and report.bytes_beside <= report.bytes_total
    assert 0 < report.bytes_overlappable <= report.bytes_total
    assert report.bytes_total == pytest.approx(sum(
        t.bytes for p in (made.graph.forward, made.graph.backward) for t in p.tasks if t.is_collective))
    json.dumps(report.to_dict())
    assert ("missing: " in report.text) != hidden


def test_a_promise_needs_most_bytes_of_its_task():
    """A flag that flies beside a product does not stand for the payload that does not; nor one piece for another."""
    made, cluster = small_plan(), load_cluster("8x8-h100")
    (piece,) = fake(made, True)
    name = made.forward_spans[0].task
    first = next(f for f in piece.flights if f.task == scope(made.graph.forward.by_name[name]))
    stays = replace(first, is_async=False, beside=(), size=1000)
    for others in ((replace(first, size=4), stays), (replace(first, size=1000), stays)):
        flights = (*(f for f in piece.flights if f is not first), *others)
        report = judge(made, (replace(piece, flights=flights),), cluster)
        assert [m["task"] for m in report.missing] == [name]
        assert report.bytes_total == pytest.approx(judge(made, (piece,), cluster).bytes_total)
        row, slow = (r for r in report.rows if r["task"] == name)
        assert row["bytes"] / slow["bytes"] == pytest.approx(others[0].size / 1000)


def test_a_program_without_collectives_keeps_no_promise():
    made = small_plan()
    report = judge(made, (Computation((), ()),), load_cluster("8x8-h100"))
    assert report.promised == len(report.missing) > 4 and report.text.endswith(f"0 of {report.promised} promised "
                                                                               "overlaps are there")


def test_a_program_out_of_order_is_seen():
    made = small_plan()
    (piece,) = fake(made, True)
    names = [i.scope for i in piece.order]
    i, j = (names.index(f"task_experts_{v}.0.0_L0") for v in ("up", "down"))
    order = list(piece.order)
    order[i], order[j] = order[j], order[i]
    report = judge(made, (Computation(piece.flights, tuple(order)),), load_cluster("8x8-h100"))
    assert not report.order_kept and "experts_down.0.0@0 runs before" in report.departures[0]


def config(*overrides):
    """The quickstart's model, with two layers and wider, on the cluster of 64."""
    return load_config("configs/mixtral-8x7b-8x8-h100.toml", [
        "model.layers=2", "model.d_model=1024", "model.heads=8", "model.kv_heads=8", "moe.d_ff=4096",
        "model.vocab=1024", "model.seq=1024", "schedule.degrees={ moe_forward = 2, moe_backward = 2 }", *overrides])


@needs_compiler
def test_a_layers_promises_are_in_the_program_and_not_without_barriers():
    links = {"node": "inter", "gpu": "intra"}
    made = SCHEDULES["pipemoe"](moe_block(SPEC, 64, 4096, links=links), load_cluster("8x8-h100"), Degrees(2, 2))
    report = prove_layer(SPEC, 64, 4096, "8x8-h100", made)
    assert report.holds and report.order_kept, report.text
    assert report.promised > 2 and report.bytes_overlapped > 0.2 * report.bytes_total
    without = prove_layer(SPEC, 64, 4096, "8x8-h100", replace(made, barriers=False))
    assert not without.holds
    assert {m["task"] for m in without.missing} <= {s.task for s in (*made.forward_spans, *made.backward_spans)}


@needs_compiler
@pytest.mark.slow
def test_parms_steps_and_gathers_fly_beside_each_other():
    """Eight H100s in two nodes: every promise holds, and of a chunk with work beside it every step is asynchronous."""
    cluster = load_cluster("8x8-h100").model_copy(update={"nodes": 2, "gpus_per_node": 4})
    mesh = AbstractMesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    spec = Spec(2048, 8192, 8, mesh=mesh, roles=Roles(("node",), ("node",), ("gpu",), ("gpu",)), dtype=jnp.bfloat16)
    block = moe_block(spec, 8, 4096, links={"node": "inter", "gpu": "intra"})
    report = prove_layer(spec, 8, 4096, cluster, SCHEDULES["parm-s2"](block, cluster, Degrees(2, 2)))
    assert report.holds and report.order_kept and report.promised > 4, report.text
    steps = [r for r in report.rows if r["task"].startswith("combine.") and r["kind"] == "collective-permute"]
    assert len(steps) == 2 * 2 * (3 + 4)   # passes, chunks, messages of both steps but the one to the device itself
    assert all(r["is_async"] for r in steps if r["task"].startswith("combine.0.0."))


@needs_compiler
@pytest.mark.slow
def test_a_train_steps_promises_are_in_the_program_and_not_without_barriers():
    made = plan(config(), "8x8-h100")
    report = prove(config(), "8x8-h100", made)
    assert report.holds, report.text
    assert report.order_kept, report.departures
    assert report.promised == len(made.forward_spans) + len(made.backward_spans) >= 3
    assert report.bytes_overlapped > 0.4 * report.bytes_total
    assert report.peak_memory_bytes > 0
    without = prove(config("schedule.barriers=false"), "8x8-h100")
    assert not without.holds
    assert all(m["task"] in {s.task for s in (*made.forward_spans, *made.backward_spans)} for m in without.missing)


@needs_compiler
@pytest.mark.slow
def test_mixtral_block_on_64_h100s():
    """Every All-to-All of the forward pass but the first and last of a layer flies beside a product."""
    cfg = load_config("configs/mixtral-8x7b-8x8-h100.toml", ["schedule.degrees={ moe_forward = 4, moe_backward = 4 }"])
    report = prove(cfg, "8x8-h100")
    assert report.holds and report.order_kept, report.text
    beside = {r["task"]: any(b.startswith("experts") for b in r["beside"]) for r in report.rows
              if r["kind"] == "all-to-all"}
    inner = [f"dispatch.0.{i}@0" for i in (1, 2, 3)] + [f"combine.0.{i}@0" for i in (0, 1, 2)]
    assert all(beside[name] for name in inner), beside


@needs_compiler
@pytest.mark.slow
def test_the_planners_mixtral_step_hides_nine_tenths_of_its_bytes():
    """Its gradients are reduced in one message a set of axes: XLA had left some of several in line."""
    report = prove(load_config("configs/mixtral-8x7b-8x8-h100.toml", ["schedule.kind=auto"]), "8x8-h100")
    assert report.holds and report.order_kept
    assert report.bytes_overlapped >= 0.9 * report.bytes_overlappable


def test_errors():
    with pytest.raises(ValueError, match="must be the 64 devices of cluster '8x8-h100', got 8"):
        prove(load_config("configs/quickstart.toml", ["schedule.kind=pipemoe", "model.scan=true"]), "8x8-h100")

