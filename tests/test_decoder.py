"""The decoder: cache, scan, packing, statistics, upcycling, and the same numbers on any mesh."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.attention import attend
from jaxmoe.config import from_dict
from jaxmoe.models import decoder
from jaxmoe.models.decoder import DecoderLM
from jaxmoe.models.upcycle import dense_config, upcycle
from jaxmoe.training.generate import sample

RAGGED = {"kind": "ragged"}
MIXED = {"data": ["a", "b"], "expert": ["b"], "expert_shard": ["c"], "model": ["c"], "fsdp": ["a"]}
slow = pytest.mark.slow
MESHES = {
    "expert data fsdp 8": ({"a": 8}, {"data": ["a"], "expert": ["a"], "fsdp": ["a"]}),
    "all roles 2 2 2": ({"a": 2, "b": 2, "c": 2}, MIXED),
}


def config(axes=None, parallel=None, train=None, moe=None, **model):
    return from_dict({
        "mesh": {"axes": axes or {"a": 1}}, "parallel": parallel or {}, "train": train or {},
        "moe": {"d_ff": 16, "num_experts": 8, "dispatch": RAGGED, **(moe or {})},
        "model": {"layers": 4 if model.get("scan") else 2, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 16,
                  "vocab": 32, "seq": 16, "moe_every": 2, **model},
    })


def mesh_of(axes):
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def build(cfg, mesh=None, dtype=None):
    return DecoderLM(cfg, mesh, nnx.Rngs(0), dtype)


def tokens_of(batch, length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 32, (batch, length)), jnp.int32)


@nnx.jit
def forward(model, tokens_BS, mask=None, segments=None):
    return model(tokens_BS, mask, segments)


def decoded(model, tokens_BS, prompt, length):
    """Logits of all tokens: a prompt at once, then one by one."""
    cache = model.init_cache(tokens_BS.shape[0], length)
    pieces = [tokens_BS[:, :prompt], *jnp.split(tokens_BS[:, prompt:], tokens_BS.shape[1] - prompt, 1)]
    out = []
    for piece in pieces:
        logits, cache = model.decode(cache, piece)
        out.append(logits)
    return jnp.concatenate(out, 1)


# Both meshes, and both ways to hold layers.
PLACES = [({"a": 1}, {}, False), (*MESHES["all roles 2 2 2"], True),
          pytest.param({"a": 1}, {}, True, marks=slow), pytest.param(*MESHES["all roles 2 2 2"], False, marks=slow)]
PLACE_NAMES = ["alone-unrolled", "2 2 2-scanned", "alone-scanned", "2 2 2-unrolled"]


@pytest.mark.parametrize(("axes", "parallel", "scan"), PLACES, ids=PLACE_NAMES)
def test_decoding_equals_the_full_forward(axes, parallel, scan):
    model, tokens_BS = build(config(axes, parallel, scan=scan), mesh_of(axes)), tokens_of(4, 12)
    full_BSV, _ = forward(model, tokens_BS)
    compiled = decoder._decode._cache_size()
    cached_BSV = decoded(model, tokens_BS, 5, 12)
    assert decoder._decode._cache_size() == compiled + 2   # the prompt, and one token
    np.testing.assert_allclose(cached_BSV, full_BSV, atol=1e-4)
    np.testing.assert_array_equal(cached_BSV.argmax(-1), full_BSV.argmax(-1))


def test_cache_is_sharded():
    axes, parallel = MESHES["all roles 2 2 2"]
    model = build(config(axes, parallel), mesh_of(axes))
    cache = model.init_cache(8, 6)
    _, cache = model.decode(cache, tokens_of(8, 1))
    for kv in cache.blocks:
        assert kv.k.sharding.shard_shape(kv.k.shape) == (2, 6, 1, 4)
    assert model.init_cache(1, 6).blocks[0].k.sharding.shard_shape((1, 6, 2, 4)) == (1, 6, 1, 4)


def test_padding_at_the_left_changes_nothing():
    model, tokens_BS = build(config()), tokens_of(2, 6)
    alone, _ = model.decode(model.init_cache(2, 6), tokens_BS)
    padded = jnp.pad(tokens_BS, ((0, 0), (3, 0)), constant_values=7)
    masked, _ = model.decode(model.init_cache(2, 9), padded, jnp.arange(9)[None] >= jnp.full((2, 1), 3))
    np.testing.assert_allclose(masked[:, 3:], alone, atol=1e-5)


def test_a_full_cache_shows():
    model = build(config())
    with pytest.raises(ValueError, match="as long as the tokens, 5"):
        model.decode(model.init_cache(1, 4), tokens_of(1, 5))
    _, cache = model.decode(model.init_cache(1, 4), tokens_of(1, 4))
    assert jnp.isnan(model.decode(cache, tokens_of(1, 1))[0]).all()


@pytest.mark.parametrize("group", ["sequence", pytest.param(4, marks=slow)])
def test_sampling(group):
    model = build(config(moe={"group": group}, layers=2))
    prompt = [int(t) for t in tokens_of(1, 20)[0]]
    key = jax.random.key(0)
    greedy = sample(model, prompt, 12, 0.0, key, window=8)
    assert greedy == sample(model, prompt[-8:], 12, 0.0, key, window=8)     # cut at the left
    assert greedy == sample(model, prompt, 12, 2.0, key, window=8, top_k=1)
    assert greedy != sample(model, prompt, 12, 2.0, key, window=8)
    text = prompt[-8:]
    window = lambda: text[-8:] if len(text) == 8 else text[-4 - (len(text) - 9) % 5 :]  # noqa: E731
    full = config(moe={"group": "sequence"}, layers=2)
    reference = build(full)
    for token in greedy:
        assert token == int(forward(reference, jnp.asarray([window()]))[0][0, -1].argmax())
        text.append(token)


def test_sampling_refuses():
    model = build(config(layers=2))
    for prompt, temperature, top_k, message in (([], 1.0, None, "prompt"), ([1], -1.0, None, "temperature"),
                                                ([1], 1.0, 0, "top_k")):
        with pytest.raises(ValueError, match=message):
            sample(model, prompt, 1, temperature, jax.random.key(0), top_k=top_k)


def loss_of(model, tokens, mask=None, segments=None):
    logits_BSV, aux = model(tokens[:, :-1], mask, segments)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens[:, 1:]).mean()
    return loss + 0.01 * aux.losses["load_balance"] + 0.001 * aux.losses["router_z"], aux


compiled_value_and_grad = nnx.jit(nnx.value_and_grad(loss_of, has_aux=True))


def value_and_grad(model, *args):
    """Loss, aux and gradients by layer: unrolled and scanned models give the same tree."""
    (loss, aux), grads = compiled_value_and_grad(model, *args)
    nnx.update(model, grads)
    layers = [nnx.to_pure_dict(nnx.state(block, nnx.Param)) for block in model.as_layers()]
    outer = {name: a for name, a in nnx.to_pure_dict(nnx.state(model, nnx.Param)).items() if name != "blocks"}
    return jax.device_get((loss, aux, layers, outer))


def assert_close(got, want, **tolerance):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, **tolerance), got, want)


@pytest.mark.parametrize(("moe_every", "remat"), [
    (2, "full"), *(pytest.param(*case, marks=slow) for case in ((1, "none"), (2, "none"), (2, "dots")))])
def test_scan_equals_unrolled(moe_every, remat):
    tokens = tokens_of(2, 9)
    want = value_and_grad(build(config(moe_every=moe_every, layers=4)), tokens)
    got = value_and_grad(build(config(moe_every=moe_every, scan=True, train={"remat": remat})), tokens)
    assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_scanned_parameters_are_sharded():
    axes, parallel = MESHES["all roles 2 2 2"]
    model = build(config(axes, parallel, scan=True), mesh_of(axes))
    w = model.blocks[1].ffn.w_up_EDF
    assert w.shape == (2, 8, 16, 16) and w[...].sharding.shard_shape(w.shape) == (2, 4, 8, 8)
    assert w.get_metadata("spec") == w[...].sharding.spec


def test_scan_needs_whole_groups():
    with pytest.raises(ValueError, match="multiple of model.moe_every=2"):
        build(config(layers=3, scan=True))


def test_program_does_not_grow_with_layers():
    """What is compiled has the same size for 2 and for 12 layers; unrolled it grows."""
    def size(layers, scan):
        model = build(config(layers=layers, scan=scan))
        return nnx.jit(lambda model, tokens: model(tokens)).lower(model, tokens_of(1, 4)).as_text().count("\n")

    assert size(12, True) == size(4, True)
    assert size(4, False) > 1.5 * size(2, False)


@pytest.mark.parametrize("scan", [pytest.param(False, marks=slow), True], ids=["unrolled", "scanned"])
def test_packed_documents_equal_the_two_alone(scan):
    model = build(config(scan=scan))
    first, second = tokens_of(2, 5, 1), tokens_of(2, 7, 2)
    segments = jnp.repeat(jnp.asarray([[3, 1]]), jnp.asarray([5, 7]), 1, total_repeat_length=12)
    packed, _ = forward(model, jnp.concatenate([first, second], 1), None, jnp.broadcast_to(segments, (2, 12)))
    np.testing.assert_allclose(packed[:, :5], forward(model, first)[0], atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:], forward(model, second)[0], atol=1e-5)


@pytest.mark.parametrize("segments", [None, jnp.asarray([[0] * 5 + [1] * 5] * 2)], ids=["whole", "packed"])
def test_padding_never_matters(segments):
    model = build(config(moe={"dispatch": {"kind": "slots", "capacity_factor": 1.0}}))
    tokens, mask = tokens_of(2, 10), jnp.asarray(np.random.default_rng(1).random((2, 10)) < 0.6)
    other = jnp.where(mask, tokens, 31 - tokens)
    (a, aux_a), (b, aux_b) = (forward(model, t, mask, segments) for t in (tokens, other))
    np.testing.assert_array_equal(a[mask], b[mask])
    assert jnp.isfinite(a).all()
    assert_close(aux_a, aux_b)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_aux_of_the_model(scan):
    model, tokens = build(config(scan=scan, layers=6)), tokens_of(2, 8)
    aux = forward(model, tokens)[1]
    assert aux.tokens_per_expert.shape == (3, 8)
    np.testing.assert_array_equal(aux.tokens_per_expert.sum(-1), 2 * 2 * 8)
    load = aux.tokens_per_expert
    np.testing.assert_allclose(aux.metrics["max_over_mean_load"], (load.max(-1) / load.mean(-1)).max())
    assert aux.metrics["dead_experts"] == (load == 0).sum()
    assert aux.losses["load_balance"].shape == () and aux.dropped_fraction == 0


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_router_bias(scan):
    router = {"kind": "topk", "bias_update_rate": 0.1}
    model = build(config(scan=scan, moe={"router": router}, layers=4))
    load_LE = jnp.stack([jnp.arange(8.0), 7.0 - jnp.arange(8)])
    nnx.jit(lambda model, load: model.update_router_bias(load))(model, load_LE)
    biases = [block.ffn.bias[...] for block in model.as_layers() if hasattr(block.ffn, "bias")]
    want = [0.1] * 4 + [-0.1] * 4
    np.testing.assert_allclose(biases, [want, want[::-1]], atol=1e-6)
    without = build(config(scan=scan, layers=4))
    without.update_router_bias(load_LE)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_attention_by_hand(backend, causal):
    q, k, v = (jax.random.normal(key, (2, 5, heads, 4)) for key, heads in zip(jax.random.split(jax.random.key(0), 3),
                                                                             (4, 2, 2), strict=True))
    got = attend(q, k, v, causal=causal, backend=backend)
    scores = np.einsum("bshd,blhd->bhsl", q, np.repeat(k, 2, 2)) / 2
    scores = np.where(np.tril(np.ones((5, 5), bool)) | (not causal), scores, -np.inf)
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("bhsl,blhd->bshd", p, np.repeat(v, 2, 2)), atol=1e-5)


def test_unknown_attention():
    x = jnp.ones((1, 2, 2, 4))
    with pytest.raises(ValueError, match="attention must be one of auto, plain, cudnn, got 'flash'"):
        attend(x, x, x, backend="flash")


@pytest.mark.parametrize(("axes", "parallel", "scan"), PLACES, ids=PLACE_NAMES)
def test_upcycled_model_starts_at_the_dense_loss(axes, parallel, scan):
    """Case 12 of what users ran into."""
    cfg, mesh, tokens = config(axes, parallel, scan=scan, layers=4), mesh_of(axes), tokens_of(4, 9)
    dense = DecoderLM(dense_config(cfg), mesh, nnx.Rngs(1))
    moe = upcycle(dense, cfg, mesh, nnx.Rngs(2))
    logits, aux = forward(dense, tokens)
    assert aux.tokens_per_expert.shape == (0, 8)
    np.testing.assert_allclose(forward(moe, tokens)[0], logits, atol=1e-5)
    w = moe.blocks[1].ffn.w_up_EDF[...]
    np.testing.assert_array_equal(w[..., :1, :, :] + jnp.zeros_like(w), w)
    assert forward(moe, tokens)[1].tokens_per_expert.shape == (2, 8)


def test_upcycling_refuses_other_widths():
    cfg = config(moe={"d_ff": 8})
    with pytest.raises(ValueError, match="moe.d_ff"):
        upcycle(build(dense_config(cfg)), cfg, None, nnx.Rngs(0))


@pytest.fixture
def one_device(x64):
    """Losses and gradients on one device in float64, by name of the dispatch."""
    return lambda cfg, *args: value_and_grad(build(cfg, None, jnp.float64), *args)


@pytest.mark.parametrize(("name", "scan", "dispatch"), [
    ("expert data fsdp 8", True, "ragged"), ("all roles 2 2 2", True, "slots"),
    pytest.param("expert data fsdp 8", False, "slots", marks=slow),
    pytest.param("all roles 2 2 2", False, "ragged", marks=slow),
])
def test_same_on_any_mesh(name, scan, dispatch, one_device):
    axes, parallel = MESHES[name]
    moe = {"dispatch": {"kind": dispatch}}
    tokens = tokens_of(8, 9)
    segments = jnp.broadcast_to(jnp.arange(8) // 5, (8, 8))
    want = one_device(config(moe=moe, layers=2), tokens, None, segments)
    model = build(config(axes, parallel, moe=moe, layers=2, scan=scan), mesh_of(axes), jnp.float64)
    assert model.embedding.dtype == jnp.float64
    placed = jax.device_put(tokens, NamedSharding(model.mesh, P(model.roles.batch_axes)))
    assert_close(value_and_grad(model, placed, None, segments), want, atol=1e-10, rtol=1e-10)


def test_warnings_are_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(build(config()), tokens_of(1, 4))
