"""Every bad config is refused with one line that says what must hold, what was given and which key to change."""

import dataclasses
import math

import jax
import pytest

from jaxmoe import ConfigError, load_config, make_mesh
from jaxmoe.config import from_dict

pytestmark = pytest.mark.core
EIGHT = {"mesh": {"axes": {"node": 2, "gpu": 4}}}
CASES = {
    "unknown key": ({"moe": {"num_expert": 8}}, r"unknown key moe.num_expert; did you mean 'num_experts'\?"),
    "unknown nested key": ({"moe": {"router": {"kk": 2}}}, r"unknown key moe.router.kk; did you mean 'k'\?"),
    "unknown section": ({"modle": {}}, r"unknown key modle; did you mean 'model'\?"),
    "wrong type": ({"train": {"steps": "many"}}, "train.steps: input should be a valid integer, got 'many'"),
    "case 30: router": ({"moe": {"router": {"kind": "topkk"}}},
                        "moe.router.kind must be one of topk, .*, got 'topkk'; did you mean 'topk'"),
    "case 30: dispatch": ({"moe": {"dispatch": {"kind": "slot"}}},
                          "moe.dispatch.kind must be one of slots, ragged, got 'slot'; did you mean 'slots'"),
    "unknown axis": (EIGHT | {"parallel": {"data": ["gpus"]}}, "parallel.data must use axes of mesh.axes .*'gpus'"),
    "axis twice": (EIGHT | {"parallel": {"data": ["gpu", "gpu"]}}, "parallel.data must use an axis once"),
    "data + model": (EIGHT | {"parallel": {"data": ["gpu"], "model": ["gpu"]}},
                     "parallel.data and parallel.model exclude each other on an axis, got 'gpu' in both"),
    "expert + expert_shard": (EIGHT | {"parallel": {"expert": ["gpu"], "expert_shard": ["gpu"]}},
                              "parallel.expert and parallel.expert_shard exclude"),
    "fsdp + model": (EIGHT | {"parallel": {"fsdp": ["gpu"], "model": ["gpu"]}},
                     "parallel.fsdp and parallel.model exclude"),
    "case 28: experts": (EIGHT | {"parallel": {"expert": ["node", "gpu"]}, "moe": {"num_experts": 12}},
                         "moe.num_experts must be divisible by 8, the devices of parallel.expert, got 12"),
    "k": ({"moe": {"num_experts": 4, "router": {"k": 5}}}, "moe.router.k must be at most moe.num_experts=4, got 5"),
    "two -1": ({"mesh": {"axes": {"a": -1, "b": -1}}}, "mesh.axes may hold -1 once"),
    "no axes": ({"mesh": {"axes": {}}}, "mesh.axes must name at least one axis, got none"),
    "axis size": ({"mesh": {"axes": {"a": 0}}}, "mesh.axes.a must be positive, or -1 once for what is left, got 0"),
    "head size": ({"model": {"d_model": 100, "heads": 8}},
                  "model.d_model must be an even multiple of model.heads=8, got 100"),
    "kv_heads": ({"model": {"kv_heads": 3}}, "model.heads must be a multiple of model.kv_heads=3, got 4"),
    "moe_every": ({"model": {"layers": 2, "moe_every": 3}}, "model.moe_every must be at most model.layers=2, got 3"),
    "expert width": (EIGHT | {"parallel": {"expert_shard": ["gpu"]}, "moe": {"d_ff": 30}},
                     "moe.d_ff must be divisible by 4, the devices of parallel.expert_shard, got 30"),
    "heads over model": (EIGHT | {"parallel": {"model": ["node", "gpu"]}},
                         "model.heads must be divisible by 8, the devices of parallel.model, got 4"),
    "kv_heads over model": (EIGHT | {"parallel": {"model": ["gpu"]}},
                            "model.kv_heads must be divisible by 4, the devices of parallel.model, got 2"),
    "d_ff over model": (EIGHT | {"parallel": {"model": ["node"]}, "model": {"d_ff": 511}},
                        "model.d_ff must be divisible by 2, the devices of parallel.model, got 511"),
    "d_model over fsdp": (EIGHT | {"parallel": {"fsdp": ["node", "gpu"]}, "model": {"d_model": 36, "heads": 2}},
                          "model.d_model must be divisible by 8, the devices of parallel.fsdp, got 36"),
    "vocab over fsdp": (EIGHT | {"parallel": {"fsdp": ["node"]}, "model": {"vocab": 257}},
                        "model.vocab must be divisible by 2, the devices of parallel.fsdp, got 257"),
    "no text files": ({"train": {"data": {"kind": "text"}}}, "train.data.files must be a glob pattern .*got none"),
    "unlike any key": ({"moe": {"dispatch": {"kind": "slots", "zzz": 1}}},
                       "unknown key moe.dispatch.zzz; known: capacity_factor, kind"),
}


ALLOWED = (("data", "expert"), ("data", "fsdp"), ("data", "expert_shard"), ("model", "expert_shard"),
           ("model", "expert"), ("fsdp", "expert"), ("fsdp", "expert_shard"))


@pytest.mark.parametrize("pair", ALLOWED, ids="+".join)
def test_these_roles_may_share_an_axis(pair):
    from_dict({"mesh": {"axes": {"a": 2}}, "parallel": {role: ["a"] for role in pair}})


@pytest.mark.parametrize(("tree", "message"), CASES.values(), ids=CASES)
def test_bad_config_is_refused_in_one_line(tree, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_dict(tree)
    assert "\n" not in str(caught.value)


def test_product_must_be_the_device_count():
    with pytest.raises(ValueError, match="mesh.axes: the product of .* must be the device count 8, got 6"):
        make_mesh(from_dict({"mesh": {"axes": {"a": 2, "b": 3}}}))
    assert math.prod(make_mesh(from_dict({"mesh": {"axes": {"a": 2, "b": -1}}})).shape.values()) == jax.device_count()


def test_files_and_overrides(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[moe]\nrouter = { kind = 'topk', k = 2 }\n")
    cfg = load_config(path, ["moe.router.k=4", "train.run_dir=somewhere", "parallel.data=['device']"])
    assert (cfg.moe.router.k, cfg.train.run_dir, cfg.parallel.data) == (4, "somewhere", ("device",))
    with pytest.raises((ValueError, dataclasses.FrozenInstanceError)):
        cfg.moe.num_experts = 4
    with pytest.raises(ConfigError, match="override 'moe' must have the form"):
        load_config(path, ["moe"])
    with pytest.raises(ConfigError, match="moe.router.k is a value, not a table"):
        load_config(path, ["moe.router.k.x=1"])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")
    path.write_text("[moe")
    with pytest.raises(ConfigError, match="must be TOML"):
        load_config(path)
