"""The command line: --json is one object, bad input one line and exit status 2, a failed check 1."""

import json
import subprocess
import sys

import pytest

CONFIG = "configs/mixtral-8x7b-8x8-h100.toml"


def jaxmoe(*args):
    return subprocess.run([sys.executable, "-c", "from jaxmoe.cli import main; main()", *map(str, args)],
                          capture_output=True, text=True)


def found(*args):
    done = jaxmoe(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    keys = found("plan", CONFIG, "--cluster", "8x8-h100", "--out", folder / "plan.json", "--timeline",
                 folder / "plan.png", "--trace", folder / "plan-trace.json", "--schedule.segment=2")
    return folder, keys


def test_plan_shows_and_writes(planned):
    folder, keys = planned
    assert keys["schedule"] == "pipemoe" and keys["degrees"]["moe_forward"] > 1
    assert keys["bound_seconds"] < keys["predicted_seconds"] < keys["alternatives"]["sequential"]
    assert keys["exposed_communication_seconds"] > 0
    assert (folder / "plan.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((folder / "plan-trace.json").read_text())["traceEvents"]


def test_plan_lists_the_mappings_of_roles_that_it_tried():
    args = ("plan", "configs/quickstart.toml", "--parallel.kind=auto", "--parallel.expert=[]", "--model.scan=true",
            "--schedule.kind=pipemoe", "--schedule.cluster=cpu-8")
    keys = found(*args)
    assert keys["roles"][0]["seconds"] == min(m["seconds"] for m in keys["roles"]) == keys["predicted_seconds"]
    assert all(m["parallel"]["kind"] == "given" and m["parallel"]["fsdp"] == ["device"] for m in keys["roles"])
    text = jaxmoe(*args).stdout
    assert f"with {keys['roles'][0]['text']}" in text and "codec of dispatch: off" in text


def test_simulate_a_saved_plan(planned):
    folder, keys = planned
    again = found("simulate", "--plan", folder / "plan.json", "--cluster", "8x8-h100")
    assert again["predicted_seconds"] == pytest.approx(keys["predicted_seconds"])
    other = found("simulate", "--plan", folder / "plan.json", "--cluster", "configs/clusters/fsmoe-b.toml")
    assert other["predicted_seconds"] > keys["predicted_seconds"]


def test_reproduce_and_doctor():
    keys = found("reproduce", "zipccl")
    assert {"cases", "mean_speedup", "min_speedup", "paper"} <= keys.keys()
    assert isinstance(found("doctor")["problems"], list)


@pytest.mark.parametrize(("args", "message"), [
    (["plan", CONFIG, "--cluster", "nowhere.toml"], "cluster file 'nowhere.toml' cannot be read"),
    (["plan", "configs/quickstart.toml"], "schedule.kind must be one of"),
    (["plan", CONFIG, "--schedule.kind=pipe"], "schedule.kind"),
    (["simulate", "--plan", "nowhere.json", "--cluster", "8x8-h100"], "plan 'nowhere.json' cannot be read"),
    (["prove", CONFIG, "--mesh.axes={ node = 2, gpu = 2 }"], "must be the 64 devices of cluster '8x8-h100', got 4"),
    (["reproduce", "everything"], "reproduce knows fsmoe"),
    (["bench", "train"], "bench train needs CONFIG"),
    (["bench", "layer", "--shpae=b"], "bench layer takes no CONFIG and no config keys, got --shpae=b"),
    (["profile", "--out", "x.toml", "--axes", "a:b"], "--axes must be like node=2:inter,gpu=4:intra, got 'a:b'"),
])
def test_bad_input_is_one_line(args, message):
    done = jaxmoe(*args)
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_help_of_every_command():
    listed = jaxmoe("--help").stdout.partition("Commands:")[2].split("\n")
    commands = {line.split()[0] for line in listed if line.strip()}
    assert commands >= {"train", "generate", "plan", "simulate", "prove", "profile", "reproduce", "bench", "doctor"}
