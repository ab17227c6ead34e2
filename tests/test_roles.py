"""Roles of mesh axes that the planner chooses."""

import itertools

import pytest

from jaxmoe import choose_roles
from jaxmoe.config import ROLES, ConfigError, from_dict
from jaxmoe.mesh import make_mesh, roles_of
from jaxmoe.plan.cluster import load_cluster
from jaxmoe.plan.simulate import simulate
from jaxmoe.planning import memory_of, plan
from jaxmoe.roles import legal, mappings
from jaxmoe.training.loop import train

H100 = load_cluster("8x8-h100")
TREE = {
    "mesh": {"axes": {"node": 8, "gpu": 8}}, "parallel": {"kind": "auto"},
    "model": {"layers": 2, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 1024, "seq": 1024, "scan": True},
    "moe": {"num_experts": 64, "d_ff": 4096, "dispatch": {"kind": "slots"}},
    "schedule": {"kind": "pipemoe", "cluster": "8x8-h100", "degrees": {"moe_forward": 2}},
    "train": {"batch": 64, "precision": "bfloat16"}}


def config(**sections):
    return from_dict(TREE | {name: TREE.get(name, {}) | values for name, values in sections.items()})


def fits(cfg, cluster):
    return memory_of(cfg, plan(cfg, cluster)).total <= cluster.device.memory_bytes


def test_the_mapping_is_the_fastest_of_all_that_fit():
    """Every mapping is planned here; the search stops at bounds."""
    cfg = config(parallel={"sizes": {"expert": 8, "model": 1}})
    small = H100.model_copy(update={"device": H100.device.model_copy(update={"memory_bytes": 900_000_000})})
    for cluster in (H100, small):
        every = [c for c in legal(cfg) if fits(c, cluster)]
        least = min(simulate(plan(c, cluster), cluster).makespan for c in every)
        found = mappings(cfg, cluster)
        assert found[0].seconds == least and len(found) < len(every)
        assert [m.seconds for m in found] == sorted(m.seconds for m in found)
        assert choose_roles(cfg, cluster) == found[0].cfg and found[0].cfg.parallel.kind == "given"
    assert 0 < len(every) < len(list(legal(cfg)))


def test_legal_mappings_are_all_that_the_config_accepts():
    """Of every way to give each axis a set of roles, in which all axes split the batch or the sequence."""
    found = {tuple(getattr(roles_of(c), role) for role in ROLES) for c in legal(config())}
    assert len(found) == len(list(legal(config())))
    sets = [s for n in range(len(ROLES) + 1) for s in itertools.combinations(ROLES, n)]
    wanted = set()
    for node, gpu in itertools.product(sets, sets):
        given = tuple(tuple(a for a, s in (("node", node), ("gpu", gpu)) if role in s) for role in ROLES)
        if all("data" in s or "model" in s for s in (node, gpu)):
            try:
                config(parallel={"kind": "given", **dict(zip(ROLES, given, strict=True))})
                wanted.add(given)
            except ConfigError:
                continue
    assert found == wanted


def test_given_roles_and_sizes_are_kept():
    for c in legal(config(parallel={"expert": ("gpu",), "sizes": {"model": 1, "fsdp": 64}})):
        roles = roles_of(c)
        assert roles.expert == ("gpu",) and not roles.model and set(roles.fsdp) == {"node", "gpu"}


@pytest.mark.parametrize(("sections", "message"), [
    ({"parallel": {"kind": "given", "sizes": {"expert": 8}}}, "parallel.sizes needs parallel.kind=\"auto\""),
    ({"parallel": {"sizes": {"experts": 8}}}, "parallel.sizes"),
    ({"parallel": {"expert": ("node",), "sizes": {"expert": 8}}}, "parallel.sizes.expert must be left out"),
    ({"schedule": {"kind": "plain"}}, 'parallel.kind="auto" needs a schedule.kind that is planned'),
])
def test_what_is_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        config(**sections)


def test_none_found_is_said():
    with pytest.raises(ConfigError, match="must find roles .* got none for mesh.axes .* drop parallel.sizes or roles"):
        choose_roles(config(parallel={"sizes": {"expert": 4}}))
    tiny = H100.model_copy(update={"device": H100.device.model_copy(update={"memory_bytes": 1000})})
    with pytest.raises(ConfigError, match="none of .* mappings of roles can be planned; .* device.memory_bytes"):
        choose_roles(config(parallel={"sizes": {"expert": 64}}), tiny)
    with pytest.raises(ValueError, match="parallel.kind must be \"given\" by now, got \"auto\": use jaxmoe.choose_rol"):
        plan(config(), H100)


def test_mappings_that_cannot_be_scheduled_are_left_out():
    """Two steps of an All-to-All need experts over both links."""
    found = mappings(config(parallel={"sizes": {"model": 1, "fsdp": 64}}, schedule={"hierarchical": True}), H100)
    assert found and all(len(roles_of(m.cfg).expert) == 2 for m in found)


@pytest.mark.slow
def test_a_run_chooses_its_roles(tmp_path):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("abcd" * 200)
    cfg = from_dict({
        "mesh": {"axes": {"node": 2, "gpu": 4}}, "parallel": {"kind": "auto", "sizes": {"expert": 4}},
        "model": {"layers": 2, "d_model": 32, "heads": 4, "kv_heads": 4, "d_ff": 32, "seq": 32, "scan": True},
        "moe": {"num_experts": 8, "d_ff": 32}, "schedule": {"kind": "auto", "cluster": "cpu-8"},
        "train": {"steps": 2, "batch": 8, "eval_batches": 0, "sample_tokens": 0, "run_dir": str(tmp_path / "run"),
                  "data": {"kind": "text", "files": str(tmp_path / "*.txt")}}})
    assert train(cfg, quiet=True)["steps"] == 2
    assert roles_of(choose_roles(cfg)).expert == ("gpu",) and make_mesh(cfg).shape["gpu"] == 4
    assert train(cfg.model_copy(update={"train": cfg.train.model_copy(update={"steps": 3})}), True, True)["steps"] == 3
