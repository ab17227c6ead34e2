"""Every schedule and the planner: plans that run, that no bound is above, and that change no value."""

import random
from dataclasses import replace
from functools import cache

import pytest
from test_plan import ROLES, block
from test_planned import FrozenDict, assert_equal, layer, layer_plan, model_values, unplanned
from test_prove import needs_compiler

from jaxmoe.config import load_config
from jaxmoe.plan.block import SAVED
from jaxmoe.plan.closed_forms import fsmoe_slack_seconds
from jaxmoe.plan.cluster import Cluster, load_cluster
from jaxmoe.plan.cost import durations
from jaxmoe.plan.graph import task_graph
from jaxmoe.plan.orders import Quick, behind, descend, fed, list_order, topological
from jaxmoe.plan.passes import sm_aware
from jaxmoe.plan.plan import Plan
from jaxmoe.plan.schedules import SCHEDULES, fsmoe, sp_moe
from jaxmoe.plan.schedules.base import Trials, all_degrees
from jaxmoe.plan.search import explain, search, variants
from jaxmoe.plan.simulate import Prepared, simulate
from jaxmoe.plan.tasks import Degrees
from jaxmoe.planning import plan
from jaxmoe.proof import prove

H100 = load_cluster("8x8-h100")
WAITING = Cluster.model_validate(
    H100.model_dump() | {"contention": {"origin": "ours", "sms_for_links": {"intra": 16, "inter": 8},
                                        "links_wait": True}})
SHAPES = {"slots": block(), "ragged": block(dispatch="ragged"), "batch": block(chunk="batch"),
          "sequence": block(dispatch="ragged", chunk="sequence"), "model": block("model", dispatch="ragged")}


def fits(kind, shape):
    """Parm's All-to-All needs slots, SP-MoE's chunks rows that are not dropped."""
    made = SHAPES[shape]
    return not (kind.startswith("parm") and made.layout != "slots" or kind == "sp-moe" and not made.by_token)


PAIRS = [(kind, shape) for kind in SCHEDULES for shape in SHAPES if fits(kind, shape)]


@cache
def made(kind, shape):
    return SCHEDULES[kind](SHAPES[shape], H100)


@pytest.mark.parametrize(("kind", "shape"), PAIRS)
def test_plans_run_survive_json_and_are_no_faster_than_their_bound(kind, shape):
    found = made(kind, shape)
    assert found.check().schedule == kind
    assert Plan.from_json(found.to_json()) == found
    timeline = simulate(found, H100)
    assert timeline.makespan >= timeline.bound_seconds * (1 - 1e-9)
    assert simulate(found, H100, contention=False).makespan <= simulate(made("sequential", shape), H100).makespan or (
        kind.startswith("parm"))


@pytest.mark.parametrize("kind", [k for k in SCHEDULES if k != "sp-moe"])
def test_given_degrees_and_slices_are_kept(kind):
    found = SCHEDULES[kind](SHAPES["slots"], H100, Degrees(2, 4), slices=3, saved=("x",))
    assert (found.degrees, found.slices, found.saved) == (Degrees(2, 4), 3, ("x",))


def test_two_steps_of_an_all_to_all_are_tried_where_experts_span_links():
    roles = dict(SHAPES["slots"].roles) | {"expert": ("node", "gpu"), "expert_shard": ()}
    given = replace(SHAPES["slots"], roles=tuple(roles.items()))
    ways = [cut for cuts in variants(given) for cut in cuts]
    assert {b.hierarchical for b in ways} == {False, True}
    assert not any(b.hierarchical for cuts in variants(SHAPES["slots"]) for b in cuts)
    found = SCHEDULES["fsmoe"](replace(given, hierarchical=True), H100, Degrees(2, 2))
    flat = SCHEDULES["fsmoe"](given, H100, Degrees(2, 2))

    def sent(plan, link):
        return sum(t.bytes for t in plan.graph.forward.tasks if t.verb in ("dispatch", "combine") and link in t.streams)

    size = given.size(("node",)), given.size(("node", "gpu"))
    of_flat = sent(flat, "inter") / (size[1] - 1) * (size[1] - size[1] / size[0])   # the part to other nodes
    assert sent(found, "inter") == pytest.approx(of_flat)
    assert Plan.from_json(found.to_json()) == found


def test_what_a_schedule_cannot_cut_is_refused():
    with pytest.raises(ValueError, match="chunks along the sequence must drop nothing"):
        SCHEDULES["sp-moe"](SHAPES["slots"], H100)
    with pytest.raises(ValueError, match='a fused All-to-All needs moe.dispatch.kind="slots", got "ragged"'):
        SCHEDULES["parm-s1"](SHAPES["ragged"], H100)
    with pytest.raises(ValueError, match='slots that a model group shares need moe.dispatch.kind="slots", got "rag'):
        replace(SHAPES["ragged"], split="slots")
    with pytest.raises(ValueError, match="moe_forward must divide the device's 2 capacity groups, got 4"):
        SCHEDULES["mast"](SHAPES["batch"], H100, Degrees(4, 4, 1, 1))


def issued(found, half, stream):
    pass_ = getattr(found.graph, half)
    return [t for t in (pass_.by_name[n] for n in getattr(found, half)) if stream in t.streams]


def test_fsmoe_issues_three_loops_on_three_streams():
    found = SCHEDULES["fsmoe"](replace(SHAPES["slots"], segment=1), H100, Degrees(4, 4), slices=4)
    verbs = [t.verb for t in issued(found, "forward", "inter") if t.verb in ("dispatch", "combine")]
    assert verbs == ["dispatch"] * 4 + ["combine"] * 4
    inside = [t.verb for t in issued(found, "forward", "intra") if t.verb.startswith("expert_")]
    assert inside == ["expert_gather"] * 4 + ["expert_reduce"] * 4
    back = [t.verb for t in issued(found, "backward", "inter") if t.verb in ("dispatch", "combine", "grad_reduce")]
    assert back[:4] == ["combine"] * 4 and back.count("grad_reduce") == 4 and back[4] == "grad_reduce"


def test_fsmoe_deals_slices_to_where_the_link_is_idle():
    pass_ = task_graph(SHAPES["slots"], Degrees(4, 4), SAVED, 4).backward
    seconds = durations(pass_, H100)
    places = fsmoe.slice_places(pass_, seconds)
    assert set(places) == {t.name for t in pass_.tasks if t.verb == "grad_reduce"}
    layer = [t for t in pass_.tasks if t.layer == 1]
    moe, dense = fsmoe.slacks(layer, seconds)
    held = [sum(seconds[n] for n, p in places.items() if p == (-1, rank))
            for rank in (fsmoe.IN_MOE, fsmoe.BESIDE_DENSE)]
    longest = max(seconds[n] for n in places)
    assert held[0] <= moe + longest and held[1] <= dense + longest
    assert fsmoe_slack_seconds(1.0, 0.5, 0.5, 3.0, 4) == 4 * 3 + 1 - 2 * 3


def test_sp_moe_runs_attention_of_the_next_layer_beside_the_last_combines():
    found = SCHEDULES["sp-moe"](replace(SHAPES["sequence"], segment=2), H100, Degrees(4, 4, 4, 4))
    assert found.block.chunk == "sequence"
    events = {e.task.name: e for e in simulate(found, H100, 2).events if e.segment == 0}
    last, first = events["combine.3.0@0"], events["attn_in.0@1"]
    assert first.start < last.end
    waits = found.graph.forward.after
    assert {f"attn_in.{i}@0" for i in range(3)} <= set(waits["attend.2@0"])


def test_all_experts_follow_their_own_attention():
    attention, experts = [["a0"], ["a1"], ["a2"], ["a3"]], [["e0"], ["e1"]]
    assert behind(attention, experts, 1) == ["a0", "a1", "a2", "e0", "a3", "e1"]
    assert behind(attention, experts, 99) == ["a0", "a1", "a2", "a3", "e0", "e1"]
    assert behind([], experts, 1) == ["e0", "e1"]


@pytest.mark.parametrize("shape", SHAPES)
def test_orders_are_orders_and_quick_agrees_with_the_simulator(shape):
    trials = Trials(SHAPES[shape], H100)
    degrees = next(d for d in all_degrees(SHAPES[shape]) if d.moe_forward > 1)
    graph = task_graph(SHAPES[shape], degrees, SAVED, 2)
    for pass_ in (graph.forward, graph.backward):
        seconds = durations(pass_, H100)
        quick = Quick(pass_, seconds)
        for order in (list_order(pass_, seconds), topological(pass_), fed(pass_, [], sp_moe._eager)):
            pass_.check_order(order, "order")
            assert quick.makespan(order) == pytest.approx(Prepared(pass_, order).makespan(seconds), rel=1e-12)
            assert quick.makespan(order) >= quick.bound * (1 - 1e-9)
        better = descend(pass_, order, seconds, trials=50)
        assert quick.makespan(better) <= quick.makespan(order) * (1 + 1e-12)
    assert trials.fits(Trials(SHAPES[shape], H100).search(fsmoe_orders(), [degrees]))


def fsmoe_orders():
    return [fsmoe.ORDERS]


def test_streams_that_wait_for_each_other_are_found():
    pass_ = task_graph(SHAPES["slots"], Degrees(2, 2), SAVED, 1).forward
    order = list(topological(pass_))
    one, two = order.index("attn_in.0@0"), order.index("attn_out.0@0")
    order[one], order[two] = order[two], order[one]
    with pytest.raises(ValueError, match="wait for each other"):
        Quick(pass_, durations(pass_, H100)).makespan(order)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_planner_is_as_fast_as_every_schedule_alone(shape):
    found = search(SHAPES[shape], H100)
    assert found.plan.check().schedule == "auto"
    for kind in (k for k in SCHEDULES if fits(k, shape)):
        assert found.seconds["auto"] <= simulate(made(kind, shape), H100).makespan * (1 + 1e-12), kind
    assert found.timeline.makespan == found.seconds["auto"]


def test_the_planner_tries_every_cut_and_explains_itself():
    cuts = [c for cs in variants(replace(SHAPES["ragged"], segment=1)) for c in cs]
    assert {c.chunk for c in cuts} == {"slots", "batch", "sequence"} and {c.segment for c in cuts} == {1, 2}
    assert {c.fused for cs in variants(SHAPES["slots"]) for c in cs} == {False, True}
    text = explain(made("fsmoe", "slots"), H100)
    for words in ("fsmoe: 2 layers together, cut along the slots", "above the bound", "busy: compute",
                  "2 times as fast links between nodes", "2 times as fast matrix products"):
        assert words in text


@pytest.mark.parametrize("kind", ["pipemoe", "fsmoe"])
def test_links_first_pays_where_collectives_wait_for_products(kind):
    blind = SCHEDULES[kind](SHAPES["slots"], WAITING, Degrees(4, 4))
    aware = sm_aware(blind, WAITING)
    assert simulate(aware, WAITING).makespan <= simulate(blind, WAITING).makespan * (1 + 1e-12)
    assert Plan.from_json(aware.to_json()) == aware
    assert sm_aware(blind, H100.model_copy(update={"contention": None})) == blind


def schedule(kind, forward, backward, dense=1, **options):
    degrees = FrozenDict(moe_forward=forward, moe_backward=backward, dense_forward=dense, dense_backward=dense)
    return (("kind", kind), ("degrees", degrees), *options.items())


slow = pytest.mark.slow


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("place", "layout", "layers", "options"), [
    ("all", "slots", 2, schedule("fsmoe", 2, 4, slices=2)),
    pytest.param("all", "ragged", 2, schedule("sp-moe", 2, 2, 4), marks=slow),
    pytest.param("expert", "ragged", 2, schedule("sp-moe", 2, 2, 4), marks=slow),
    pytest.param("expert", "ragged", 4, schedule("sp-moe", 4, 4, 2, slices=2), marks=slow),
    pytest.param("all", "slots", 2, schedule("parm-s1", 2, 4), marks=slow),
    pytest.param("all", "slots", 2, schedule("parm-s2", 2, 4), marks=slow),
    pytest.param("all", "slots", 2, schedule("parm-s2", 4, 4, 2, chunk="batch", segment=2), marks=slow),
    pytest.param("expert", "slots", 4, schedule("fsmoe", 4, 2, slices=3, segment=2), marks=slow),
    pytest.param("expert", "slots", 4, schedule("mast", 2, 2, 2, chunk="batch", segment=2, slices=2), marks=slow),
    pytest.param("all", "slots", 4, schedule("mast", 2, 3, slices=2), marks=slow),
    pytest.param("all", "ragged", 2, (("kind", "auto"),), marks=slow),
    pytest.param("expert", "slots", 4, (("kind", "auto"), ("sm_aware", True)), marks=slow),
])
def test_stacks_equal_the_unplanned(place, layout, layers, options):
    assert_equal(model_values(place, layout, layers, options), model_values(place, layout, layers))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("place", "degrees"), [
    ("all", Degrees(2, 3)), pytest.param("expert-shard", Degrees(4, 2), marks=slow)])
def test_a_fused_all_to_all_equals_the_unplanned_layer(place, degrees):
    found = layer_plan(place, "slots", "parm-s1", degrees)
    assert found.block.fused and not any("gather" in t.verb and "expert" in t.verb for t in found.graph.forward.tasks)
    assert_equal(layer(place, "slots")[1](found), unplanned(place, "slots"))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("place", "layout", "degrees", "changes"), [
    ("all", "slots", Degrees(2, 3), {}),
    pytest.param("all", "slots", Degrees(1, 2), {"fused": False}, marks=slow),
    pytest.param("apart", "slots", Degrees(2, 1), {"saved": ("x",)}, marks=slow),
    pytest.param("apart", "slots", Degrees(2, 2, 2, 2), {"chunk": "batch"}, marks=slow),
    pytest.param("apart", "enough slots", Degrees(2, 2, 2, 2), {"chunk": "sequence"}, marks=slow),
    pytest.param("model", "slots", Degrees(2, 2), {}, marks=slow),
    pytest.param("same", "slots", Degrees(1, 2), {}, marks=slow),
    pytest.param("expert-shard", "slots", Degrees(2, 1), {}, marks=slow),   # no model axes: nothing is shared out
])
def test_slots_that_a_model_group_shares_equal_the_unplanned_layer(place, layout, degrees, changes):
    options = {n: changes[n] for n in ("chunk", "saved") if n in changes}
    found = layer_plan(place, layout, "parm-s2", degrees, **options)
    if "fused" in changes:
        found = SCHEDULES["pipemoe"](replace(found.block, fused=False), H100, degrees)
    gathers = {t.verb for t in found.graph.forward.tasks} & {"token_gather", "combine_gather"}
    assert len(gathers) == (2 if found.block.size(found.block.role("model")) > 1 else 0)
    assert_equal(layer(place, layout)[1](found), unplanned(place, layout))


SHARED = replace(block("model"), fused=True, split="slots")


def test_gathers_are_one_step_behind_the_all_to_alls():
    """Parm's SAA: the link between nodes goes from step to step, the one inside gathers the step before."""
    found = SCHEDULES["parm-s2"](replace(SHARED, segment=1), H100, Degrees(1, 1))
    at = {e.task.name: e for e in simulate(found, H100, 1, contention=False).events if e.segment == 0}
    steps = [at[f"combine.0.0.{s}@0"] for s in range(8)]
    gathers = [at[f"combine_gather.0.0.{s}@0"] for s in range(8)]
    assert [e.task.streams for e in steps] == [("intra",), *[("inter",)] * 7]
    for s in range(1, 8):
        assert gathers[s].start == steps[s].end
        assert s == 7 or gathers[s].end < steps[s + 1].end
        assert s == 1 or steps[s].start == steps[s - 1].end
    sent = {v: sum(t.bytes for t in found.graph.forward.tasks if t.verb == v) for v in ("dispatch", "combine")}
    assert sent["combine"] == pytest.approx(sent["dispatch"])
    back = [t for t in found.graph.backward.tasks if t.of.startswith("combine_gather")]
    assert len(back) == 8 and {t.kind for t in back} == {"reduce_scatter"}


def test_parms_schedules_are_chosen_by_cost():
    """S2 sends what a group may fill, S1 what each of its devices may: equal where nothing can be dropped."""
    full = replace(block("model"), rows=128 * 16, group_rows=1024 * 16)   # every expert has room for every token
    for shape, faster, slower in ((block("model"), "parm-s2", "parm-s1"), (full, "parm-s1", "parm-s2")):
        seconds = {kind: simulate(SCHEDULES[kind](shape, H100), H100).makespan for kind in (faster, slower)}
        assert seconds[faster] < seconds[slower]
    assert {c.split for cs in variants(block("model")) for c in cs} == {"tokens", "slots"}
    found = search(block("model"), H100, Degrees(1, 1))
    assert {"parm-s1", "parm-s2"} < set(found.seconds) and found.plan.block.split == "slots"


def test_steps_are_not_coded():
    coded = replace(SHARED, codec=(("dispatch", "x4s"), ("combine", "x4s")), bytes_per_value=2)
    verbs = {t.verb for t in task_graph(coded, Degrees(2, 2), SAVED, 1).forward.tasks}
    assert "encode_dispatch" in verbs and "encode_combine" not in verbs


MIXTRAL = "configs/mixtral-8x7b-8x8-h100.toml"
CHUNKS = 'schedule.degrees={moe_forward=4,moe_backward=4,dense_forward=%d,dense_backward=%d}'


@slow
@needs_compiler
@pytest.mark.parametrize("options", [
    ["schedule.kind=fsmoe", CHUNKS % (1, 1), "schedule.slices=4"],
    ["schedule.kind=mast", "schedule.slices=4"],
    ["schedule.kind=sp-moe", CHUNKS % (4, 4), "schedule.slices=4", 'moe.dispatch={kind="slots",capacity_factor=4.0}'],
    ["schedule.kind=auto"],
], ids=["fsmoe", "mast", "sp-moe", "auto"])
def test_what_plans_promise_is_compiled(options):
    cfg = load_config(MIXTRAL, options)
    found = plan(cfg, H100)
    report = prove(cfg, H100, found)
    assert report.holds and report.promised > 8
    beside = {r["task"]: set(r["beside"]) for r in report.rows if r["is_async"]}
    products = {n for n in (*found.forward, *found.backward) if n.startswith("experts")}
    inter = [b for n, b in beside.items() if n.startswith(("dispatch", "combine"))]
    intra = [b for n, b in beside.items() if n.startswith("expert_")]
    assert any(a & b & products for a in inter for b in intra)   # both links at work beside one experts' product
    if found.block.chunk == "sequence":
        assert any("attend" in t for n, b in beside.items() if n.startswith("combine") and n.endswith("@0")
                   for t in b if t.endswith("@1"))
    slices = {n: b for n, b in beside.items() if n.startswith("grad_reduce")}
    assert all(slices.values()) and any(slices)
    if found.schedule == "fsmoe":
        assert all(b & products for b in slices.values())


def test_random_layers_are_never_planned_slower():
    """Small blocks of many shapes; the planner against each schedule."""
    pick = random.Random(0)
    for _ in range(6):
        roles = pick.choice([r for r in ROLES if r != "fsdp"])
        base = block(roles, dispatch=pick.choice(("slots", "ragged")))
        shape = replace(base, d_model=pick.choice((256, 4096)), d_ff=pick.choice((512, 14336)), segment=1,
                        layers=pick.choice((1, 3)), rows=base.rows * pick.choice((1, 4)))
        found = search(shape, H100)
        assert found.seconds["auto"] == min(found.seconds.values())
