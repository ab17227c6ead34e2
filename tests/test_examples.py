"""The examples run as a user would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = """
mesh = { axes = { device = 8 } }
parallel = { data = ["device"], expert = ["device"] }
model = { layers = 1, d_model = 16, heads = 2, kv_heads = 1, d_ff = 16, seq = 8 }
moe = { d_ff = 16 }
train = { batch = 8, warmup_steps = 0, learning_rate = 0.02 }
"""


def losses(*command):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.parametrize("name", ["own_nnx_model", "own_linen_model"])
def test_own_models_learn(name):
    found = losses(ROOT / "examples" / f"{name}.py")
    assert found[-1] < 0.5 * found[0]


def test_train_from_config(tmp_path):
    (tmp_path / "c.toml").write_text(TINY)
    found = losses(ROOT / "examples" / "train_from_config.py", tmp_path / "c.toml", 8)
    assert len(found) == 8 and found[-1] < found[0]


def test_slurm_script_is_a_shell_script():
    subprocess.run(["bash", "-n", ROOT / "examples" / "slurm.sh"], check=True)
