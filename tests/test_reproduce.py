"""Reproductions of published grids: modelled figures, and that they are what the event simulator says."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.plan.closed_forms import saa_seconds
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.cost import bytes_sent, seconds
from jaxmoe.plan.tasks import Task
from jaxmoe.reproduce import NAMES, as_text, auto, fsmoe, parm, reproduce, sm_aware, sp_moe, zipccl
from jaxmoe.reproduce.testbeds import TESTBEDS

CLUSTERS = Path(__file__).parents[1] / "configs/clusters"


# The planner's grid takes minutes: see test_search.py.
IDS = [pytest.param(name, marks=pytest.mark.slow) if name == "mast" else name for name in NAMES if name != "auto"]


@pytest.fixture(scope="module")
def results():
    """Name -> result, simulated once."""
    found = {}

    def get(name):
        if name not in found:
            found[name] = reproduce(name)
        return found[name]

    return get


@pytest.mark.parametrize("name", IDS)
def test_result(name, results):
    result = results(name)
    assert set(result) >= {"cases", "mean_speedup", "min_speedup", "paper", "notes"}
    assert result["mean_speedup"].keys() == result["min_speedup"].keys()
    assert all(np.isfinite(v) for v in result["mean_speedup"].values())
    assert min(result["min_speedup"].values()) >= 1 - 1e-9
    assert all(line in as_text(result) for line in result["notes"])


def test_plot_and_unknown_name(tmp_path):
    reproduce("fsmoe", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="reproduce knows fsmoe.*, got 'gpt'"):
        reproduce("gpt")


@pytest.mark.parametrize("testbed", TESTBEDS, ids=lambda t: t.name)
def test_testbeds_are_the_cluster_files(testbed):
    """The paper's seconds for n elements equal the cluster's for the bytes that a device sends of them."""
    cluster, n = load_cluster(CLUSTERS / f"fsmoe-{testbed.name.lower()}.toml"), 1e7
    shard = n / testbed.gpus_per_node
    for kind, stream, group, operand, line in (
            ("all_to_all", "inter", testbed.nodes, n, testbed.all_to_all),
            ("all_reduce", "inter", testbed.nodes, n, testbed.all_reduce),
            ("all_gather", "intra", testbed.gpus_per_node, shard, testbed.gather),
            ("reduce_scatter", "intra", testbed.gpus_per_node, n, testbed.scatter)):
        sent = bytes_sent(kind, 4 * operand, group)
        task = Task("t", "v", (stream,), (), (), kind, bytes=sent)
        assert seconds(task, cluster) == pytest.approx(line.seconds(n), rel=1e-4)
    product = Task("t", "v", ("compute",), (), (), "matmul", flops=2e10)
    assert seconds(product, cluster) == pytest.approx(testbed.product.seconds(1e10), rel=1e-4)


def test_fsmoe_cases_equal_the_scalar_simulator():
    """The grid's arrays are the event simulation of each case."""
    for testbed in TESTBEDS:
        case = fsmoe.layers(testbed)
        for r, streams in ((1, 3), (4, 3), (4, 1)):
            prepared = fsmoe.moe(r, streams, True)
            times = fsmoe.times(testbed, case, r, True) | {"slice": np.full(1458, 1e-3), "rest": np.full(1458, 2e-3)}
            many = fsmoe.grid.seconds(prepared, times, 0.7)
            for i in range(0, 1458, 97):
                one = {t.name: float(times[t.verb][i]) for t in prepared.tasks}
                assert prepared.run(one, efficiency=0.7).makespan == pytest.approx(many[i], rel=1e-12)


def test_fsmoe_figures(results):
    """No range to hit but what an independent simulation of this model gives; the paper's order of mean times."""
    result = results("fsmoe")
    assert result["cases"] == 2916
    mean, paper = result["mean_speedup"], result["paper"]
    for testbed, low, high in (("A", 1.26, 1.36), ("B", 1.30, 1.42)):
        assert low <= mean[f"{testbed}: tutel+pipemoe"] <= high
        assert abs(mean[f"{testbed}, eta 0.7: tutel+pipemoe"] - paper[f"{testbed}: tutel+pipemoe"]) <= 0.04
        assert 0.45 <= result["different_degrees"][testbed] <= 0.75
        times = result["mean_seconds"][testbed]
        assert times["fsmoe"] < times["no-iio"] < times["tutel+gradient"] < times["tutel+pipemoe"]


def test_parm_rule_picks_the_cheaper(results):
    result = results("parm")
    assert result["cases"] == 2 * 1296
    assert set(result["rule_is_cheaper"].values()) == {1.0}
    assert min(v for k, v in result["min_speedup"].items() if "deepspeed" in k) >= 1.13
    for name in "AB":
        alone = result["over_deepspeed_moe"][name]
        assert alone["parm"] == [result[f][f"{name}: deepspeed-moe"] for f in ("mean_speedup", "min_speedup")]
        assert alone["parm"][0] >= max(alone["s1 only"][0], alone["s2 only"][0])
        assert 2.0 <= alone["parm"][0] <= 3.5


@pytest.mark.parametrize(("gather", "wanted"), [(1.0, 9.0), (2.0, 10.0), (5.0, 22.0)])
def test_parm_saa_hides_all_but_one_step(gather, wanted):
    """Gathers shorter than the steps: one is exposed; longer ones: one step of the All-to-All is."""
    assert parm.saa_seconds(4, np.array([8.0]), np.array([gather])) == [wanted] == [saa_seconds(2.0, gather, 4)]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("p, q, lag", [(1, 1, 1), (4, 4, 1), (2, 8, 2), (8, 2, 8)])
def test_sp_moe_dependencies(p, q, lag, backward):
    """Attention waits for its chunk before and its own tokens' combines; a dispatch for attention of its tokens."""
    prepared = sp_moe.pipeline(p, q, lag, backward)
    after = {t.name: [prepared.tasks[i].name for i in r] for t, r in zip(prepared.tasks, prepared.reads, strict=True)}
    of_layer = {}
    for name in after:
        if name.startswith("attention"):
            of_layer.setdefault(name.partition(".")[2], []).append(name)
    assert len(of_layer) == sp_moe.LAYERS and all(len(names) == p for names in of_layer.values())
    layer = "1" if not backward else "2"
    above = (1 if not backward else 2) - 1
    for k in range(q):
        read = after[f"dispatch.{layer}.{k}"]
        number = -(-(k + 1) * p // q)
        assert read == [f"attention{p + 1 - number if backward else number}.{above}"]
    times = dict.fromkeys((f"attention{i}" for i in range(1, p + 1)), 1.0) | {"dispatch": 1.0, "experts": 1.0,
                                                                               "combine": 1.0}
    alone = sp_moe.LAYERS * (p + 3 * q)
    makespan = prepared.makespan({t.name: times[t.verb] for t in prepared.tasks})
    assert makespan == alone if (p, q) == (1, 1) else makespan < alone


def test_sp_moe_figures(results):
    less = results("sp-moe")["less_time"]
    assert all(0.16 <= less[f"{t}: sequential"] <= 0.36 for t in "AB")
    assert all(0 < less[f"{t}: tutel"] < less[f"{t}: sequential"] for t in "AB")


def test_sm_aware_split_pass_does_the_same_work():
    base = fsmoe.moe(2, 3, False)
    split = sm_aware.split_experts(base, 4)
    assert len(split.tasks) == len(base.tasks) + 2 * 3
    times = dict.fromkeys(("dispatch", "gather", "scatter", "combine"), 1.0)
    whole = base.makespan({t.name: times.get(t.verb, 4.0) for t in base.tasks})
    assert split.makespan({t.name: times.get(t.verb, 1.0) for t in split.tasks}) == whole


def test_sm_aware_figures(results):
    mean = results("sm-aware")["mean_speedup"]
    for testbed in "AB":
        assert mean[f"{testbed}: blind"] >= mean[f"{testbed}: degrees"] >= mean[f"{testbed}: split"] >= 1


def test_zipccl_raw_is_plain_alpha_beta():
    raw = zipccl.Codec(1.0, 1e9)
    assert raw.transfer(np.array([1e6])) == [zipccl.ALPHA_SECONDS + 1e-3]
    coded = zipccl.Codec(2.0, 1e9)
    assert coded.transfer(np.array([1e6])) == pytest.approx([zipccl.ALPHA_SECONDS + 5e-4 + 2e-5 + 1.5e-6])


def test_zipccl_never_gains_more_than_its_ratio(results):
    result = results("zipccl")
    assert max(result["max_speedup"].values()) <= max(zipccl.RATIOS.values()) + 1e-9
    mean = result["mean_speedup"]
    assert mean["100 Gb/s, moe: communication"] > mean["400 Gb/s, moe: communication"] > 1


@pytest.mark.slow
def test_mast_is_not_slower_than_what_it_searches(results):
    result = results("mast")
    assert result["cases"] == 2 * 432
    for variant in ("A", "B", "A, eta 0.7", "B, eta 0.7"):
        mean = [result["mean_speedup"][f"{variant}: {b}"] for b in ("deepspeed-moe", "tutel+pipemoe", "fsmoe")]
        assert mean[0] > mean[1] > mean[2] > 1


def test_many_cases_are_planned_in_processes_of_their_own(monkeypatch):
    case = ("A", auto.blocks("parm", TESTBEDS[0])[0])
    monkeypatch.setattr(auto, "FEW", 0)
    assert auto._ladders([case]) == [auto.ladder(*case)]
