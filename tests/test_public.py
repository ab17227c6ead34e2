"""What users see: every public name has an example that runs, and the README's matrix is true."""

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmoe

ROOT = Path(__file__).parent.parent
PUBLIC = {name: value for name, value in vars(jaxmoe).items() if name[0] != "_" and not inspect.ismodule(value)}
PUBLIC |= {"linen.MoE": jaxmoe.linen.MoE}


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NEEDS = {"prove": [pytest.mark.slow, pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"),
                                                        reason="pip install 'jaxmoe[prove]'")]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS.get(name, ())) for name in PUBLIC])
def test_every_public_name_has_an_example_that_runs(name, monkeypatch):
    doc = inspect.getdoc(PUBLIC[name]) or ""
    example = re.search(r"Example: ``(.+?)``", doc, re.DOTALL)
    assert example, f"jaxmoe.{name}"
    monkeypatch.chdir(ROOT)
    known = {"x_BSD": jnp.ones((2, 16, 64)), "tokens_BS": jnp.ones((1, 8), int)}
    exec(" ".join(example[1].split()), PUBLIC | known | {"jaxmoe": jaxmoe, "jax": jax, "jnp": jnp, "nnx": nnx})


def test_every_module_says_what_it_is():
    for path in [*ROOT.glob("jaxmoe/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        assert path.read_text().startswith('"""'), path


def test_the_readmes_support_matrix_is_true():
    matrix, readme = script("support_matrix"), (ROOT / "README.md").read_text()
    assert matrix.replaced(readme) == readme
    assert "| `soft` | nnx, Linen | refused | refused | leaks the future |" in readme


@pytest.mark.slow
def test_ablations_take_away_what_they_say():
    """On a new model, whose attention and experts do something, but nothing of use."""
    ablations = script("quickstart_ablations")
    cfg = jaxmoe.load_config(ROOT / "configs" / "quickstart.toml",
                             ["model.d_model=32", "moe.d_ff=32", "moe.dispatch={kind='ragged'}"])
    model = jaxmoe.DecoderLM(cfg, None, nnx.Rngs(0))
    same = ablations.with_mean_experts(model)
    for old, new in zip(model.blocks, same.blocks, strict=True):
        w, mean = old.ffn.w_up_EDF[...], new.ffn.w_up_EDF[...]
        assert jnp.array_equal(mean, jnp.broadcast_to(w.mean(0), w.shape)) and not jnp.array_equal(w, mean)
    tokens = jax.random.randint(jax.random.key(0), (2, 17), 0, 256)
    found = ablations.ablations(model, [tokens])
    assert len(set(found.values())) == 3
    # Alone, a token's loss depends on it and its target only.
    for alone in (True, False):
        whole, first, second = (float(ablations.loss_of(model, tokens[:, a:b], alone))
                                for a, b in ((0, 3), (0, 2), (1, 3)))
        assert (abs(whole - (first + second) / 2) < 1e-5) == alone


def test_cases_name_tests_that_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "tests" / "cases.md").read_text()))
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert len(named) > 30 and named <= set(re.findall(r"def (test_\w+)", tests))


def test_the_installed_package_holds_every_package_of_the_tree():
    """An editable install finds what a wheel would leave out."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = [*ROOT.glob("jaxmoe/**/__init__.py"), *ROOT.glob("kernels/**/__init__.py")]
    written = {".".join(file.parent.relative_to(ROOT).parts) for file in files}
    written = {name if name.startswith("jaxmoe") else f"jaxmoe.{name}" for name in written}
    assert set(setuptools["packages"]) == written | {"jaxmoe.clusters"}
