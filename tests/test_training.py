"""Training: resume, resharding, faults, and the command line."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxmoe.config import from_dict
from jaxmoe.training.loop import train


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("".join(rng.choice(list("abcd \n"), 600)))
    return str(tmp_path / "*.txt")


def tree(text, run_dir, **train_keys):
    return {
        "mesh": {"axes": {"device": 8}},
        "parallel": {"data": ["device"], "expert": ["device"], "fsdp": ["device"]},
        "model": {"layers": 1, "d_model": 16, "heads": 2, "kv_heads": 1, "d_ff": 16, "seq": 16},
        "moe": {"num_experts": 8, "d_ff": 16},
        "train": {"steps": 4, "batch": 8, "eval_batches": 1, "eval_every": 2, "log_every": 1, "checkpoint_every": 2,
                  "warmup_steps": 1, "sample_tokens": 2, "run_dir": str(run_dir),
                  "data": {"kind": "text", "files": text}} | train_keys,
    }


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def test_resume_is_bitwise_the_uninterrupted_run(text, tmp_path):
    whole = tree(text, tmp_path / "whole")
    train(from_dict(whole), quiet=True)
    cut = tmp_path / "cut"
    subprocess.run(["cp", "-r", tmp_path / "whole", cut], check=True)
    subprocess.run(["rm", "-r", cut / "checkpoints" / "4"], check=True)   # as if killed after step 2's checkpoint
    train(from_dict(tree(text, cut)), resume=True, quiet=True)
    assert losses(cut) == losses(tmp_path / "whole") and len(losses(cut)) == 4
    with pytest.raises(ValueError, match="use --resume or another train.run_dir"):
        train(from_dict(whole), quiet=True)


def test_not_finite_stops_and_keeps_the_good_checkpoint(text, tmp_path):
    with pytest.raises(RuntimeError, match="training stopped at step"):
        train(from_dict(tree(text, tmp_path / "run", learning_rate=1e38, checkpoint_every=1)), quiet=True)


def test_command_line(text, tmp_path):
    run, config = tmp_path / "run", tmp_path / "c.toml"
    config.write_text('[model]\nlayers = 1\nd_model = 16\nheads = 2\nkv_heads = 1\nd_ff = 16\nseq = 16\n'
                      '[moe]\nd_ff = 16\n')
    options = ["--mesh.axes={ device = 8 }", "--parallel.expert=['device']", "--train.data.kind=text",
               "--train.steps=2", f"--train.data.files={text}", "--train.batch=8",
               "--train.eval_batches=1", "--train.sample_tokens=1",
               f"--train.run_dir={run}"]

    def cli(*args):
        return subprocess.run([sys.executable, "-c", "from jaxmoe.cli import main; main()", *args],
                              capture_output=True, text=True)

    done = cli("train", str(config), "--json", *options)
    assert done.returncode == 0, done.stderr
    assert {"steps", "final_loss", "eval_loss", "tokens_per_second", "run_dir"} <= json.loads(done.stdout).keys()
    done = cli("generate", str(run), "--prompt", "ab", "--tokens", "2", "--json")
    assert done.returncode == 0 and "text" in json.loads(done.stdout), done.stderr
    done = cli("train", str(config), "--moe.num_expert=4")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "did you mean" in done.stderr


def test_eight_devices_are_there():
    assert jax.device_count() == 8
