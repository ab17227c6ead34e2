"""The planner: as fast as any schedule alone, near the fastest of all orders, and within a device's memory."""

import random
from dataclasses import replace
from functools import cache

import pytest
from test_plan import block

from jaxmoe.config import from_dict
from jaxmoe.plan.block import SAVED, Block, Param, less_saved
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.graph import task_graph
from jaxmoe.plan.memory import Memory, estimate, live
from jaxmoe.plan.orders import Quick, chains
from jaxmoe.plan.schedules.base import Bench
from jaxmoe.plan.search import Space, combined, search
from jaxmoe.plan.simulate import simulate
from jaxmoe.plan.tasks import Degrees, Pass, Task
from jaxmoe.planning import plan
from jaxmoe.reproduce import auto, reproduce
from jaxmoe.reproduce.testbeds import TESTBEDS

H100 = load_cluster("8x8-h100")


def fastest_seconds(quick: Quick, most: float) -> float:
    """The least of all issue orders of a pass, or `most` if none is faster: branch and bound over active schedules.

    Some fastest order starts, at every step, one of the tasks that could start before the one that could end first
    does and that shares a stream with it (Giffler and Thompson).
    """
    wiring, seconds, behind = quick.wiring, quick.seconds, chains(quick.wiring, quick.seconds)
    best = most

    def step(start: dict[int, float], missing: list[int], free: tuple[float, ...], last: float) -> None:
        """start: of tasks whose reads have ended, by their streams too late or not."""
        nonlocal best
        if not start:
            best = min(best, last)
            return
        at = {i: max(t, *(free[s] for s in wiring.streams[i])) for i, t in start.items()}
        todo = [i for i, m in enumerate(missing) if m or i in start]
        busy = [f + sum(seconds[i] for i in todo if s in wiring.streams[i]) for s, f in enumerate(free)]
        if max(*busy, *(at[i] + behind[i] for i in at)) >= best * (1 - 1e-9):
            return
        first = min(at, key=lambda i: at[i] + seconds[i])
        end = at[first] + seconds[first]
        rivals = [i for i in at if not set(wiring.streams[i]).isdisjoint(wiring.streams[first])
                  and (at[i] < end or i == first)]
        for i in sorted(rivals, key=lambda i: -behind[i]):
            ended, others, waiting = at[i] + seconds[i], {j: t for j, t in start.items() if j != i}, missing.copy()
            for j in wiring.readers[i]:
                known[j].append(ended)
                waiting[j] -= 1
                if not waiting[j]:
                    others[j] = max(known[j])
            step(others, waiting, tuple(ended if s in wiring.streams[i] else f for s, f in enumerate(free)),
                 max(last, ended))
            for j in wiring.readers[i]:
                known[j].pop()

    known: list[list[float]] = [[] for _ in seconds]
    missing = [len(r) for r in wiring.reads]
    step({i: 0.0 for i, m in enumerate(missing) if not m}, missing, (0.0, 0.0, 0.0), 0.0)
    return best


def small_block(pick: random.Random) -> Block:
    """A MoE layer in two chunks, on one or two links."""
    shard = pick.choice(((), ("gpu",)))
    experts = [Param(n, "experts", (1, 64, 64)) for n in ("w_up_EFD", "w_down_EFD")]
    return Block(1, 256, 2 ** pick.randrange(9, 13), 2 ** pick.randrange(9, 14), 8, 1, 2 ** pick.randrange(5, 11),
                 gated=pick.random() < 0.5, axes=(("node", 8), ("gpu", 8)), links=(("node", "inter"), ("gpu", "intra")),
                 roles=(("expert", ("node",)), ("expert_shard", shard)), params=tuple(experts))


def gap(given: Block) -> float:
    """Of the planner's order, over the fastest of all at its degrees."""
    trials = Bench(H100).trials(given)
    found = combined(trials, [Degrees(2, 2)], Space(), float("inf"))
    assert found is not None
    found, graph = found.refined(), trials.graph(found.choice)
    passes = (graph.forward, found.choice.orders.forward), (graph.backward, found.choice.orders.backward)
    least = sum(fastest_seconds(trials.of(p).quick, trials.pass_seconds(p, order)) for p, order in passes)
    return found.layer_seconds / least - 1


def gaps(count: int) -> list[float]:
    pick = random.Random(0)
    return [gap(small_block(pick)) for _ in range(count)]


def test_orders_are_near_the_fastest_of_all():
    assert max(gaps(8)) < 0.02


@pytest.mark.slow
def test_orders_of_200_small_cases_are_near_the_fastest_of_all():
    assert max(gaps(200)) < 0.02


def test_exhaustive_search_finds_what_is_known_to_be_fastest():
    """Two chains, one on compute for 3, then on a link for 1; the other the other way round."""
    tasks = [Task("a", "a", ("compute",), (), ("a!",)), Task("b", "b", ("inter",), ("a!",), ("b!",)),
             Task("c", "c", ("inter",), (), ("c!",)), Task("d", "d", ("compute",), ("c!",), ("d!",))]
    quick = Quick(Pass(tuple(tasks)), {"a": 3.0, "b": 1.0, "c": 1.0, "d": 3.0})
    assert fastest_seconds(quick, 100.0) == quick.makespan(["c", "a", "b", "d"]) == 6.0
    assert fastest_seconds(quick, 5.0) == 5.0


@cache
def sampled() -> dict:
    return reproduce("auto", sample=1)


def test_planner_is_never_slower_than_any_single_on_the_grids():
    """On a sample: FSMoE's, Mast's, SP-MoE's and Parm's layers on both testbeds."""
    found = sampled()
    assert found["cases"] == 4 * 2
    assert min(found["min_speedup"].values()) >= 1 - 1e-9
    for name in ("fsmoe A", "mast B", "sp-moe A", "parm B"):
        steps = [found["mean_speedup"][f"{name}, {step}: best single"] for step in ("order", "layout", "slices")]
        assert steps == sorted(steps)
        assert f"{name}: mast" in found["mean_speedup"] and found["mean_gap_to_bound"][name] >= 0
    assert "sp-moe B: sp-moe" in found["mean_speedup"] and "fsmoe B: sp-moe" not in found["mean_speedup"]


def test_a_sample_is_of_the_planner_only():
    with pytest.raises(ValueError, match="sample must be a positive number, of auto only, got 3 for 'parm'"):
        reproduce("parm", sample=3)


def test_grids_send_and_compute_what_their_papers_count():
    """FSMoE: x / n_ESP elements All-to-All, x gathered, x H / n_ESP multiply-adds a product; dense 4 M^2 / n_MP."""
    case = {"batch": 2, "length": 1024, "width": 1024, "ratio": 2, "capacity": 1.2, "activation": "simple"}
    given = auto.block(TESTBEDS[0], case, by_token=False)
    graph = task_graph(given, Degrees(), SAVED, 1)
    tasks = {t.verb: t for t in graph.forward.tasks}
    x = 1.2 * 2 * 1024 * 1024
    assert tasks["dispatch"].bytes == pytest.approx(4 * x / 8 * 5 / 6, rel=0.01)
    assert tasks["expert_gather"].bytes == pytest.approx(4 * x * 7 / 8, rel=0.01)
    assert tasks["experts_up"].flops == pytest.approx(2 * x * 2048 / 8, rel=0.01)
    reduced = [t for t in graph.tail.tasks if t.verb == "grad_reduce"]
    assert sum(t.bytes for t in reduced) == pytest.approx(2 * 4 * 4 * 1024**2 / 8 * 5 / 6)
    assert {s for t in reduced for s in t.streams} == {"inter"}
    parm = auto.block(TESTBEDS[0], {"n_mp": 2, "n_esp": 4, "batch": 2, "length": 512, "width": 1024, "ratio": 1,
                                    "k": 2, "factor": 1.2}, by_token=False)
    assert (parm.size(parm.role("model")), parm.size(parm.role("expert_shard"))) == (2, 4)
    assert parm.size(tuple(dict(parm.axes))) == 48


def test_memory_is_what_is_stored_and_saved_and_live():
    """A MoE layer without links: every number by hand."""
    given = Block(2, 8, 16, 32, 4, 1, 4, gated=False, layers=3, params=(
        Param("w_up_EFD", "experts", (4, 32, 16)), Param("w_down_EFD", "experts", (4, 32, 16))))
    graph = task_graph(given, Degrees(), ("x", "hidden", "rows"), 1)
    found = estimate(given, graph, tuple(graph.forward.by_name), tuple(graph.backward.by_name), outside=10)
    params = 3 * 2 * 4 * 32 * 16 + 10
    assert found[:3] == (4 * params, 4 * params, 8 * params)
    x, hidden = 4 * 2 * 8 * 16, 4 * 4 * 4 * 32
    assert found.saved == 3 * (x + hidden)   # rows are there as slots, which are not saved
    assert found.total == sum(found) and found.working > hidden


def test_live_values_end_with_their_last_reader():
    tasks = [Task("a", "a", ("compute",), (), ("x",)), Task("b", "b", ("compute",), ("x",), ("y",)),
             Task("c", "c", ("compute",), ("y",), ("z",)), Task("d", "d", ("compute",), (), ("w",))]
    size = {"x": 1.0, "y": 2.0, "z": 4.0, "w": 8.0}.__getitem__
    assert live(Pass(tuple(tasks)), "abcd", size) == 8.0       # w alone
    assert live(Pass(tuple(tasks)), "abdc", size) == 2.0 + 8.0   # y, and w
    assert live(Pass(tuple(tasks[:3])), "abc", size) == 6.0    # y and z
    assert live(Pass(tuple(tasks)), "dabc", size) == 8.0
    assert live(Pass(tuple(tasks)), "dabc", size, {"w"}) == 8.0 + 6.0   # w is a result


def test_gradients_stay_until_the_segment_ends_and_are_then_pending():
    """Whole, in float32, as reductions come a segment later: those of one segment and of the one above at once."""
    axes = {"axes": (("data", 2),), "links": (("data", "inter"),), "roles": (("data", ("data",)),)}
    large = Param("w_up_EFD", "experts", (4, 4096, 16), reduce=("data",))
    given = Block(2, 8, 16, 32, 4, 1, 4, gated=False, layers=4, **axes, params=(
        large, Param("w_down_EFD", "experts", (4, 32, 16))))
    working = {}
    for segment in (1, 2, 4):
        block = replace(given, segment=segment)
        graph = task_graph(block, Degrees(), SAVED, 1)
        working[segment] = estimate(block, graph, tuple(graph.forward.by_name), tuple(graph.backward.by_name)).working
    assert 2 * 4 * large.size < working[1] < 2.2 * 4 * large.size + 4 * large.size   # and the gathered parameter
    assert working[2] - working[1] > 2 * 4 * large.size
    assert working[4] < working[2] + 4 * large.size   # nothing is pending where all is one segment


def test_less_and_less_is_saved():
    sets = [SAVED, *less_saved(SAVED)]
    assert all(set(b) < set(a) for a, b in zip(sets, sets[1:], strict=False)) and sets[-1] == ("x",)
    assert less_saved(("x",)) == []


def test_a_plan_fits_the_device_or_none_is_made():
    given = block()
    free = search(given, H100, memory_bytes=float("inf"))
    most = free.memory
    tight = search(given, H100, memory_bytes=most.total - most.saved / 4)
    assert tight.memory.total <= most.total - most.saved / 4 < most.total
    assert set(tight.plan.saved) < set(free.plan.saved) and tight.timeline.makespan >= free.timeline.makespan
    with pytest.raises(ValueError, match="device.memory_bytes of cluster '8x8-h100' must hold a plan, got 0.00 GB, "
                                         "but the smallest one takes .* use .*, or a larger device"):
        search(given, H100, memory_bytes=1e6)


def test_candidates_are_cut_apart_and_in_order():
    found = search(block(dispatch="ragged"), H100, memory_bytes=float("inf"))
    assert len(found.candidates) > 2
    assert len({(c.plan.block, c.plan.degrees) for c in found.candidates}) == len(found.candidates)
    seconds = [simulate(c.plan, H100).makespan for c in found.candidates]
    assert seconds == sorted(seconds) == [c.seconds for c in found.candidates]
    slots, sequence, more = found.candidates
    assert [c.plan.block.chunk for c in found.candidates] == ["slots", "sequence", "slots"]
    assert replace(found, candidates=(slots, more, sequence)).unlike(2) == [slots.plan, sequence.plan]
    assert replace(found, candidates=(slots, more, sequence)).unlike(9) == [slots.plan, sequence.plan, more.plan]


def test_more_chunks_are_chosen_where_only_they_fit():
    """The fastest plan's working set is larger than that of more chunks."""
    given = replace(block(), segment=1)
    free = search(given, H100, Degrees(1, 1), memory_bytes=float("inf"))
    found = search(given, H100, memory_bytes=free.memory.total * 0.98)
    assert found.memory.total <= free.memory.total * 0.98


def test_the_configs_plan_fits_its_cluster():
    tree = {"mesh": {"axes": {"node": 8, "gpu": 8}}, "parallel": {"data": ["node", "gpu"], "expert": ["node"]},
            "model": {"layers": 2, "scan": True}, "schedule": {"kind": "auto"}, "train": {"batch": 64}}
    assert plan(from_dict(tree), H100).schedule == "auto"
    small = H100.model_copy(update={"device": H100.device.model_copy(update={"memory_bytes": 1000})})
    with pytest.raises(ValueError, match="device.memory_bytes"):
        plan(from_dict(tree), small)


def test_memory_reads_well():
    assert str(Memory(1e9, 1e9, 2e9, 0.5e9, 0.25e9)) == (
        "4.75 GB (parameters 1.00, gradients 1.00, optimizer 2.00, saved 0.50, working 0.25)")
