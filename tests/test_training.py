"""The train step and the loop: gradients, accumulation, faults, resume and data."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe.config import from_dict
from jaxmoe.training import data as data_lib
from jaxmoe.training.loop import train
from jaxmoe.training.step import global_norm, gradients, init_state, learning_rate_schedule, train_step

ALL = {"data": ["device"], "expert": ["device"], "fsdp": ["device"]}
TWO_BY_TWO = ({"a": 2, "b": 2}, {"data": ["a"], "expert": ["a"], "model": ["b"]})
MODEL = {"layers": 1, "d_model": 16, "heads": 2, "kv_heads": 2, "d_ff": 16, "seq": 8, "vocab": 64}


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text("".join(rng.choice(list("abcd \n"), 600)))
    return str(tmp_path / "*.txt")


def tree(text, run_dir, **train_keys):
    return {
        "mesh": {"axes": {"device": 8}},
        "parallel": ALL,
        "model": {"layers": 1, "d_model": 16, "heads": 2, "kv_heads": 1, "d_ff": 16, "seq": 16},
        "moe": {"num_experts": 8, "d_ff": 16},
        "train": {"steps": 4, "batch": 8, "eval_batches": 1, "eval_every": 2, "log_every": 1, "checkpoint_every": 2,
                  "warmup_steps": 1, "sample_tokens": 2, "run_dir": str(run_dir),
                  "data": {"kind": "text", "files": text}} | train_keys,
    }


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def state_on(axes, parallel, moe=(), model=(), **train_keys):
    cfg = from_dict({"mesh": {"axes": axes}, "parallel": parallel, "model": MODEL | dict(model),
                     "moe": {"d_ff": 16} | dict(moe), "train": {"warmup_steps": 0, "steps": 20} | train_keys})
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes),
                         devices=jax.devices()[: math.prod(axes.values())])
    return init_state(cfg, mesh)


def masked_batch(rows=8):
    """Rows with 2 to 9 valid tokens, so that every microbatch has another number of them."""
    tokens = np.random.default_rng(0).integers(0, 64, (rows, 9)).astype(np.int32)
    return {"tokens": tokens, "mask": np.arange(9) < (2 + np.arange(rows) % 8)[:, None]}


@partial(nnx.jit, static_argnames=("coefs", "accumulate"))
def compiled_gradients(model, batch, coefs, accumulate):
    return gradients(model, batch, dict(coefs), accumulate)


def grads_of(model, batch, coefs, accumulate=1):
    metrics, grads = compiled_gradients(model, batch, tuple(coefs.items()), accumulate)
    flat = nnx.to_flat_state(grads)
    return metrics, {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in flat}


def assert_close(found, wanted, rtol=1e-5):
    for name, value in wanted.items():
        scale = max(np.abs(value).max(), 1e-30)
        np.testing.assert_allclose(found[name] / scale, value / scale, atol=rtol, err_msg=name)


@pytest.fixture(scope="module")
def one_device():
    return state_on({"device": 1}, ALL)[0]


def test_case_02_global_norm_is_the_logical_trees(one_device):
    model, _ = state_on(*TWO_BY_TWO)
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(nnx.state(one_device, nnx.Param))]
    want = np.sqrt(sum((x**2).sum() for x in leaves))
    for m in (model, one_device):
        np.testing.assert_allclose(jax.jit(global_norm)(nnx.state(m, nnx.Param)), want, rtol=1e-6)
    batch, coefs = masked_batch(), {"load_balance": 0.01, "router_z": 1e-3}
    norms = [np.sqrt(sum((g.astype(np.float64)**2).sum() for g in grads_of(m, batch, coefs)[1].values()))
             for m in (model, one_device)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unrolled", "scan"])
def test_case_13_every_parameter_changes_in_one_step(scan):
    model, optimizer = state_on({"device": 8}, ALL, model={"layers": 2, "scan": scan}, moe={"router": {"k": 8}})
    before = {path: np.array(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    tokens = np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)
    metrics = train_step(model, optimizer, tokens)
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert (np.asarray(v.get_value()) != before[path]).any(), path
    # Case 21: losses under a scan are found, and the cross-entropy is reported apart from them.
    total = metrics["loss"] + 0.01 * metrics["load_balance"] + 1e-3 * metrics["router_z"]
    np.testing.assert_allclose(metrics["total"], total, rtol=1e-6)
    np.testing.assert_allclose(metrics["load_balance"], 1, rtol=1e-6)   # as every expert gets every token


def test_case_15_router_gradient_without_cross_entropy(one_device):
    batch = masked_batch() | {"loss_mask": np.zeros((8, 9), bool)}
    router = "blocks.0.ffn.router.w_DE"
    grad = {c: grads_of(one_device, batch, {"load_balance": c})[1][router] for c in (0.01, 0.02)}
    assert np.abs(grad[0.01]).max() > 0
    np.testing.assert_allclose(grad[0.02], 2 * grad[0.01], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("axes", [pytest.param(1, marks=pytest.mark.slow), 2], ids="{} devices".format)
def test_case_16_one_batch_equals_accumulated_microbatches(axes):
    model, _ = state_on({"device": axes}, ALL)
    batch, coefs = masked_batch(), {"router_z": 0.1}
    metrics, grads = grads_of(model, batch, coefs)
    parts, accumulated = grads_of(model, batch, coefs, accumulate=4)
    assert_close(accumulated, grads)
    for name in ("loss", "router_z", "tokens_per_expert", "dropped_fraction"):
        np.testing.assert_allclose(parts[name], metrics[name], rtol=1e-5)


def test_case_16_auxiliary_losses_are_weighted_by_valid_tokens(one_device):
    batch, coefs = masked_batch(), {"load_balance": 0.5}
    no_target = {"loss_mask": np.zeros((8, 9), bool)}
    _, accumulated = grads_of(one_device, batch | no_target, coefs, accumulate=4)
    micro = [{name: a[i::4] for name, a in (batch | no_target).items()} for i in range(4)]
    valid = np.array([m["mask"][:, :-1].sum() for m in micro])
    assert len(set(valid)) > 1
    every = [grads_of(one_device, m, coefs)[1] for m in micro]
    want = {n: sum(w * g[n] for w, g in zip(valid / valid.sum(), every, strict=True)) for n in accumulated}
    assert_close(accumulated, want)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_case_20_bias_moves_once_a_step(remat):
    router = {"score": "sigmoid", "bias_update_rate": 0.01}
    model, optimizer = state_on({"device": 2}, ALL, moe={"router": router}, remat=remat, weight_decay=1.0)
    batch = masked_batch()
    pairs = np.asarray(grads_of(model, batch, {})[0]["tokens_per_expert"])
    for accumulate in (4,):
        train_step(model, optimizer, batch, accumulate=accumulate)
    want = 0.01 * np.sign(pairs.mean(-1, keepdims=True) - pairs)
    np.testing.assert_allclose(model.blocks[0].ffn.bias[...], (want - want.mean(-1, keepdims=True))[0], atol=1e-7)


def test_masks_and_segments_keep_targets_out(one_device):
    tokens = np.random.default_rng(1).integers(0, 64, (8, 9)).astype(np.int32)
    segments = np.repeat([[0, 0, 0, 0, 1, 1, 1, 1, 1]], 8, 0)
    whole = grads_of(one_device, {"tokens": tokens}, {})[0]
    packed = grads_of(one_device, {"tokens": tokens, "segment_ids": segments}, {})[0]
    assert whole["loss"] != packed["loss"]
    scored = np.ones((8, 9), bool)
    scored[:, 4] = False   # the first token of the second document
    both = grads_of(one_device, {"tokens": tokens, "segment_ids": segments, "loss_mask": scored}, {})[0]
    np.testing.assert_allclose(packed["loss"], both["loss"], rtol=1e-6)


@pytest.mark.parametrize(("schedule", "last"), [("cosine", 1e-4), ("constant", 1e-2)])
def test_learning_rate(schedule, last):
    keys = {"steps": 10, "warmup_steps": 2, "learning_rate": 1e-2, "min_learning_rate": 1e-4, "schedule": schedule}
    rate = learning_rate_schedule(from_dict({"train": keys}))
    np.testing.assert_allclose([rate(0), rate(1), rate(2), rate(10)], [0, 5e-3, 1e-2, last], rtol=1e-5)


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


@pytest.mark.parametrize(("where", "named"), [
    ("embedding", "step 1: loss and gradients and parameters must be finite"),
    ("rate", "step 1: parameters must be finite"),
])
def test_not_finite_is_named_and_changes_nothing(where, named, monkeypatch, text, tmp_path):
    cfg = from_dict(tree(text, tmp_path / "run", checkpoint_every=1, warmup_steps=0,
                         learning_rate=1e-3 if where == "embedding" else 3e38,
                         weight_decay=0.0 if where == "embedding" else 1e30))
    if where == "embedding":
        from jaxmoe.training import loop

        def broken(*args):
            model, optimizer = init_state(*args)
            model.embedding[...] = model.embedding[...].at[:, 0].set(jnp.nan)
            return model, optimizer

        monkeypatch.setattr(loop, "init_state", broken)
    with pytest.raises(RuntimeError, match=f"training stopped at .*{named}"):
        train(cfg, quiet=True)
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_batch_must_fit_microbatches_and_devices(text, tmp_path):
    message = "train.batch must be a multiple of the 8 devices .* train.accumulate=2, got 8"
    with pytest.raises(ValueError, match=message):
        train(from_dict(tree(text, tmp_path / "run", accumulate=2)), quiet=True)


@pytest.mark.slow
def test_interrupted_run_goes_on_as_if_it_had_not_been(text, tmp_path):
    keys = {"steps": 30, "eval_every": 0, "checkpoint_every": 0, "sample_tokens": 0}
    settings = {name: tree(text, tmp_path / name, **keys) for name in ("whole", "cut")}
    train(from_dict(settings["whole"]), quiet=True)
    code = ("import json, sys, jax; jax.config.update('jax_num_cpu_devices', 8); from jaxmoe.config import from_dict; "
            "from jaxmoe.training.loop import train; train(from_dict(json.loads(sys.argv[1])), quiet=True)")
    run = subprocess.Popen([sys.executable, "-c", code, json.dumps(settings["cut"])], stderr=subprocess.PIPE, text=True,
                           env=os.environ | {"JAX_PLATFORMS": "cpu"})
    log = tmp_path / "cut" / "metrics.jsonl"
    while run.poll() is None and (not log.is_file() or log.read_text().count("\n") < 3):
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    message = run.communicate(timeout=120)[1]
    assert "go on with `jaxmoe train CONFIG --resume`" in message, message
    assert len(losses(tmp_path / "cut")) < 30
    train(from_dict(settings["cut"]), resume=True, quiet=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_tokenizer_file(text, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()   # type: ignore[assignment]
    files = [str(p) for p in tmp_path.glob("*.txt")]
    tokenizer.train(files, trainers.BpeTrainer(vocab_size=60, special_tokens=["?"], show_progress=False))
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    data = {"kind": "text", "files": text, "tokenizer": path}
    corpus = data_lib.load_corpus(from_dict({"model": {"seq": 16, "vocab": 64}, "train": {"data": data}}))
    assert 0 <= corpus.train.min() and corpus.train.max() < 60 and len(corpus.train) < 11 * 600
    vocab = tokenizer.get_vocab_size()
    with pytest.raises(ValueError, match=f"model.vocab must be at least the tokenizer's {vocab}, got 16"):
        data_lib.load_corpus(from_dict({"model": {"seq": 16, "vocab": 16}, "train": {"data": data}}))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="train.data.tokenizer must be a tokenizers JSON file"):
        data_lib.make_codec(str(tmp_path / "bad.json"))


def test_batches_do_not_depend_on_the_number_of_processes():
    tokens = np.arange(1000)
    whole = next(data_lib.train_iterator(tokens, 8, 4, 0))["tokens"]
    parts = [next(data_lib.train_iterator(tokens, 8, 4, 0, np.array(rows)))["tokens"] for rows in ([0, 1], [2, 3])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def hlo_lines(num_experts):
    model, _ = state_on({"device": 1}, ALL, moe={"num_experts": num_experts})
    return len(nnx.jit(lambda m, b: gradients(m, b, {})).lower(model, masked_batch()).as_text().splitlines())


def test_case_38_no_unrolling_over_experts():
    assert hlo_lines(128) == hlo_lines(64)
