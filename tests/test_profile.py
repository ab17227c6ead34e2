"""A cluster file fitted on eight simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe import MoE, TopK
from jaxmoe.config import from_dict
from jaxmoe.measure import choice, modules, training
from jaxmoe.measure.modules import fitted, with_launch, with_modules
from jaxmoe.measure.profile import as_text, fit, profile
from jaxmoe.measure.timing import in_a_row
from jaxmoe.mesh import make_mesh
from jaxmoe.plan.cluster import Cluster, Module, load_cluster
from jaxmoe.plan.cost import amount, is_module, module_of, seconds
from jaxmoe.plan.execute import watched
from jaxmoe.plan.plan import Plan
from jaxmoe.plan.schedules import SCHEDULES
from jaxmoe.plan.simulate import simulate
from jaxmoe.plan.tasks import Degrees, Task
from jaxmoe.planned.layer import layer_plan
from jaxmoe.planning import candidates, coded, plan
from jaxmoe.training import loop
from jaxmoe.training.loop import train

MEASURED = from_dict({
    "mesh": {"axes": {"d": 8}}, "parallel": {"data": ["d"], "expert": ["d"]},
    "schedule": {"kind": "pipemoe"}, "train": {"batch": 8},
    "model": {"layers": 1, "d_model": 32, "heads": 2, "kv_heads": 2, "seq": 32, "vocab": 64, "scan": True},
    "moe": {"num_experts": 8, "d_ff": 64, "dispatch": {"kind": "slots", "capacity_factor": 2.0}}})


def test_fit_recovers_a_line():
    amounts = [1e3, 1e4, 1e5, 1e6]
    found = fit("x", amounts, [1e-5 + 2e-9 * n for n in amounts])
    assert found.alpha_seconds == pytest.approx(1e-5) and found.seconds_per_unit == pytest.approx(2e-9)
    assert found.r2 == pytest.approx(1)


def test_fit_has_no_negative_part():
    assert fit("x", [1.0, 2.0, 3.0], [0.5, 2.0, 3.5]).alpha_seconds == 0
    with pytest.raises(ValueError, match="x must take longer for larger amounts"):
        fit("x", [1.0, 2.0, 3.0], [3.0, 2.0, 1.0])


def test_profile_on_simulated_devices():
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    cluster, fits = profile(mesh, {"node": "inter", "gpu": "intra"}, "here", (2**14, 2**23), (64, 512), repeats=3)
    assert {f.what for f in fits} == {"matmul", "memory"} | {
        f"{link}.{kind}" for link in ("intra", "inter")
        for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")}
    assert all(np.isfinite(f.r2) for f in fits)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.matmul.origin) == (2, 4, "measured")
    assert cluster.inter.all_to_all is not None and cluster.inter.all_to_all.seconds_per_byte > 0
    assert cluster.contention is not None
    assert cluster.contention.compute_slowdown is not None and 1 <= cluster.contention.compute_slowdown <= 2
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert "inter.all_reduce" in as_text(fits)


def test_profile_on_one_device_has_no_links():
    mesh = jax.make_mesh((1,), ("gpu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    cluster, fits = profile(mesh, {"gpu": "intra"}, "alone", (2**14, 2**23), (64, 512), repeats=3)
    assert {f.what for f in fits} == {"matmul", "memory"}
    assert cluster.contention is None and cluster.intra.all_to_all is None and cluster.num_devices == 1


def test_modules_take_the_place_of_other_costs():
    cluster = load_cluster("8x8-h100")
    up = Task("experts_up.0.1@0:dx", "experts_up", ("compute",), (), (), "matmul", 3e9, direction="input_grad")
    again = Task("pack.0@0:again", "pack", ("compute",), (), (), "memory", bytes=5e6, direction="recompute")
    coded = Task("encode_dispatch.0@0", "encode_dispatch", ("compute",), (), (), "encode:x4s", bytes=7e6)
    assert [module_of(t) for t in (up, again, coded)] == ["experts_up:dx", "pack", "encode_dispatch:x4s"]
    assert [amount(t) for t in (up, again, coded)] == [3e9, 5e6, 7e6]
    line = Module(origin="measured", alpha_seconds=1e-3, seconds_per_unit=1e-12)
    measured = cluster.model_copy(update={"modules": {"experts_up:dx": line}})
    assert seconds(up, measured) == pytest.approx(1e-3 + 3e-3) != seconds(up, cluster)
    assert seconds(again, measured) == seconds(again, cluster)
    assert Cluster.from_toml(measured.to_toml()) == measured


def test_modules_are_lines_where_they_can_be():
    assert fitted("x", {1.0: 2.0, 2.0: 3.0, 4.0: 5.0}).alpha_seconds == pytest.approx(1)
    one = fitted("x", {4.0: 2.0})
    assert (one.alpha_seconds, one.seconds_per_unit) == (0, 0.5)
    assert fitted("x", {1.0: 5.0, 2.0: 3.0, 4.0: 4.0}).alpha_seconds == 4   # larger ones take no longer


def test_gathers_are_not_priced_as_casts_of_whole_parameters():
    cast = Task("param_gather.norm@0", "param_gather", ("compute",), (), (), "memory")
    gather = Task("param_gather.attention@0", "param_gather", ("inter",), (), (), "all_gather", bytes=1e6)
    assert module_of(cast) == module_of(gather) and is_module(gather) and not is_module(cast)


def test_watching_sees_every_task_and_what_it_writes():
    moe = MoE(8, 8, 4, router=TopK(2), schedule="pipemoe", rngs=nnx.Rngs(0))
    made, seen = layer_plan("pipemoe", moe.spec, 2, 8), {}

    def see(task, run, reads, consts):
        seen[task.name] = len(task.writes) == len(jax.eval_shape(run, reads, consts))

    with watched(see):
        jax.eval_shape(jax.grad(lambda x: moe(x)[0].sum()), jnp.ones((2, 8, 8)))
    wanted = {t.name for t in (*made.graph.forward.tasks, *made.graph.backward.tasks)}
    assert wanted <= set(seen) and all(seen.values())


@pytest.mark.parametrize("longer", [0.0, 0.05])
def test_launching_takes_what_more_chunks_take_longer_than_simulated(monkeypatch, longer):
    cluster = load_cluster("cpu-8")
    few, many = (SCHEDULES["pipemoe"](coded(MEASURED, cluster), cluster, Degrees(r, r), slices=r) for r in (1, 4))
    apart = simulate(many, cluster).makespan - simulate(few, cluster).makespan + longer
    monkeypatch.setattr(modules, "steppers", lambda *_: {})
    monkeypatch.setattr(modules, "seconds_of", lambda *_: ({"few": 1.0, "many": 1.0 + apart}, {}))
    found = with_launch(MEASURED, cluster)
    assert simulate(many, found).makespan - simulate(few, found).makespan == pytest.approx(apart, rel=1e-3, abs=1e-6)
    assert (found.device.launch_seconds > 1e-6) == (longer > 0)
    assert with_launch(MEASURED, cluster, degrees=(2,)) == cluster


def test_calls_in_a_row_send_enough():
    seen = []
    calls, count = in_a_row(lambda: seen.append(0), 2**18)
    calls()
    assert len(seen) == count == 4
    assert in_a_row(seen.clear, 1)[1] == 16 and in_a_row(seen.clear, 2**24)[1] == 1


AUTO = from_dict(MEASURED.model_dump() | {"schedule": {"kind": "auto", "cluster": "cpu-8", "candidates": 3}})


def chunked():
    cluster = load_cluster("cpu-8")
    return [SCHEDULES["pipemoe"](coded(AUTO, cluster), cluster, Degrees(r, r)) for r in (1, 2, 4)]


def test_the_candidate_that_is_measured_as_the_fastest_is_chosen(monkeypatch):
    monkeypatch.setattr(training, "steppers", lambda cfg, mesh, plans: plans)
    monkeypatch.setattr(training, "seconds_of", lambda calls, repeats: ({n: abs(int(n) - 1.0) for n in calls}, {}))
    made = chunked()
    monkeypatch.setattr(choice, "candidates", lambda cfg, cluster: made)
    found = choice.choose(AUTO, None)
    assert found.plan == made[1] and found.seconds == (1.0, 0.0, 1.0)
    assert "the fastest of 3, whose steps took 1.000, 0.000, 1.000 s" in found.text
    assert candidates(AUTO, load_cluster("cpu-8"))[0] == plan(AUTO)


def test_a_run_keeps_its_choice(monkeypatch, tmp_path):
    chosen = choice.MeasuredPlan(candidates(AUTO, load_cluster("cpu-8"))[-1], load_cluster("cpu-8"), (3.0, 2.0, 1.0))
    asked = []
    monkeypatch.setattr(choice, "choose", lambda *_: asked.append(1) or chosen)
    for resume in (False, True):
        assert loop.measured_plan(AUTO, None, tmp_path, resume)[0] == chosen.plan
        assert len(asked) == 1
    assert Plan.from_json((tmp_path / "plan.json").read_text()) == chosen.plan
    assert load_cluster(tmp_path / "cluster.toml") == chosen.cluster
    other = AUTO.model_copy(update={"train": AUTO.train.model_copy(update={"batch": 16})})
    loop.measured_plan(other, None, tmp_path, True)   # what was kept is for other shapes
    assert len(asked) == 2
    assert loop.measured_plan(MEASURED, None, tmp_path, True) == (None, "")


@pytest.mark.slow
def test_steps_of_candidates_are_measured(tmp_path):
    calls = training.steppers(AUTO, make_mesh(AUTO), dict(enumerate(chunked())))
    losses = [float(call()) for _ in range(2) for call in calls.values()]
    assert losses == sorted(losses, reverse=True)   # all train one model, on one batch; the first at rate 0
    assert len(set(losses)) == 5
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("abcd" * 200)
    options = {"steps": 1, "eval_batches": 0, "sample_tokens": 0, "run_dir": str(tmp_path / "run"),
               "data": {"kind": "text", "files": str(tmp_path / "*.txt")}}
    cfg = from_dict(AUTO.model_dump() | {"model": AUTO.model.model_dump() | {"vocab": 256},
                                         "train": AUTO.train.model_dump() | options})
    assert train(cfg, quiet=True)["steps"] == 1
    kept = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
    assert kept in candidates(cfg, load_cluster(tmp_path / "run" / "cluster.toml"))


@pytest.mark.slow
def test_a_measured_model_is_planned_with_its_modules():
    cluster, fits = with_modules(MEASURED, load_cluster("cpu-8"), repeats=1)
    made = plan(MEASURED, cluster)
    tasks = [t for p in (made.graph.forward, made.graph.backward, made.graph.tail) for t in p.tasks]
    assert {module_of(t) for t in tasks if is_module(t)} <= set(cluster.modules) == {f.what for f in fits}
    later = {name: m.model_copy(update={"alpha_seconds": m.alpha_seconds + 1}) for name, m in cluster.modules.items()}
    slower = cluster.model_copy(update={"modules": later})
    assert simulate(made, slower).makespan > simulate(made, cluster).makespan + 1
