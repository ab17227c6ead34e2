"""Routers and their losses: the oracle's equations, edge cases, padding, faulty tokens and metrics."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from against_oracle import (
    ROUTERS,
    B,
    D,
    E,
    S,
    check,
    check_all_routings,
    inputs,
    make,
    mesh,
    noise_of,
    setting_of,
    values_and_gradients,
    weights_of,
)
from flax import nnx

from jaxmoe import Cosine, ExpertChoice, MoE, NoisyTopK, Ragged, Roles, Slots, Soft, TopK
from jaxmoe.routing import updated_bias

pytestmark = pytest.mark.usefixtures("x64")
WITH_DISPATCH = [(name, layout) for name in ROUTERS for layout in ("slots-tight", "ragged")
                 if (name, layout) != ("soft", "ragged")]
VARIANTS = {
    "k 1": TopK(k=1),
    "k 1 normalised": TopK(k=1, normalize=True),
    "k 2 not normalised, scaled": TopK(k=2, normalize=False, scale=2.5),
    "every expert": TopK(k=E),
    "sigmoid, bias": TopK(k=3, score="sigmoid", scale=2.5, bias_update_rate=0.01),
    "groups, bias": TopK(k=3, score="sigmoid", groups=4, groups_kept=2, bias_update_rate=0.01),
    "groups of one": TopK(k=2, groups=8, groups_kept=3),
    "cosine k 1": Cosine(k=1, projection_rank=3),
    "cosine normalised": Cosine(k=3, normalize=True),
    "few tokens an expert": ExpertChoice(0.5),
    "every token": ExpertChoice(8.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    layout = ("slots-tight", "ragged")[list(VARIANTS).index(name) % 2]
    check_all_routings(make(layout=layout, router=VARIANTS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_on_a_mesh_with_all_roles(name, layout):
    check_all_routings(make("all", layout, router=VARIANTS[name]))


@pytest.mark.parametrize(("place", "layout"), [("one-device", "ragged"), ("all", "slots-tight")])
def test_noise_is_a_function_of_key_and_place_in_the_global_batch(place, layout):
    moe, key = make(place, layout, router="noisy_topk"), jax.random.key(7)
    check(moe, inputs(3, 7), key=key)
    assert np.unique(noise_of(key, 3, 7)).size == 3 * 7 * E


@pytest.mark.parametrize("router", [TopK(k=1), NoisyTopK(k=1), Cosine(k=1), ExpertChoice(1.0), Soft(2)],
                         ids=lambda router: type(router).__name__)
def test_one_expert(router):
    check(make(layout="slots-tight", router=router, num_experts=1), inputs())


def test_ties_go_to_the_lowest_indices():
    aux, _ = check(make("all", routing="ties"), inputs())
    np.testing.assert_array_equal(aux.tokens_per_expert, [B * S, B * S, *[0] * (E - 2)])


@pytest.mark.parametrize(("router", "layout"), WITH_DISPATCH)
def test_case_11_shared_experts_case_17_padding_and_a_token_that_is_not_finite(router, layout):
    """One compiled program. A faulty token is as padding, but for its own output and the metric that counts it."""
    moe, x = make("all", layout, router=router, shared_experts=2), inputs(3, 7)
    mask = np.random.default_rng(1).random((3, 7)) < 0.6
    check(moe, x, mask)
    good, bad = mask.copy(), (1, 2)
    mask[bad], good[bad] = True, False
    for value in (np.nan, np.inf):
        broken = np.where(mask[..., None], x, np.nan)
        broken[bad][3] = value
        (y, aux), grads = values_and_gradients(moe, jnp.asarray(broken), mask)
        (want_y, want_aux), want_grads = values_and_gradients(moe, jnp.asarray(x), good)
        assert np.isnan(y[bad]).all() and aux.metrics.pop("nonfinite_tokens") == 1
        assert want_aux.metrics.pop("nonfinite_tokens") == 0
        same = lambda got, want: jax.tree.map(np.testing.assert_array_equal, got, want)  # noqa: E731
        same(y[good], want_y[good])
        same((aux, grads), (want_aux, want_grads))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((aux, grads)))


@pytest.mark.parametrize(("router", "layout"), [
    (router, layout) for router in (TopK(k=1), TopK(k=2), NoisyTopK(k=1), Cosine(k=1), ExpertChoice(2.0), Soft(2))
    for layout in ("slots-tight", "ragged") if not (isinstance(router, Soft) and layout == "ragged")], ids=str)
def test_case_04_the_router_learns_without_auxiliary_losses(router, layout):
    moe, x = make(layout=layout, router=router), jnp.asarray(inputs())
    graph, state = nnx.split(moe)
    grads = jax.jit(jax.grad(lambda state: (nnx.merge(graph, state)(x)[0] ** 2).sum()))(state)
    for name, param in grads.router.items():
        if name != "w_noise_DE":   # no noise without a key
            assert np.linalg.norm(param[...]) > 1e-3, name


def document_loss(x, w, setting, segments, mask):
    """Mean over documents of sum_e f_e P_e, by loops. (DeepSeek-V3, eqs. 17-20)"""
    d, losses = oracle.decide(x, w, setting, oracle.Given(mask)), []
    for b in range(len(x)):
        for segment in np.unique(segments[b][mask[b]]):
            tokens = np.flatnonzero(mask[b] & (segments[b] == segment))
            scores = oracle.scores_of(np, setting.router, oracle.logits_of(np, setting.router, x[b, tokens], w))
            P_E = (scores / scores.sum(-1, keepdims=True)).mean(0)
            f_E = np.bincount(d.experts[b, tokens].ravel(), minlength=E) * E / (setting.router.k * len(tokens))
            losses.append((f_E * P_E).sum())
    return np.mean(losses)


@pytest.mark.parametrize("place", ["one-device", "all"])
def test_case_18_deepseek_seq_by_loops(place):
    moe = make(place, load_balance="deepseek_seq", router=TopK(k=2, score="sigmoid"))
    x, segments = inputs(), np.random.default_rng(2).integers(0, 3, (B, S)).cumsum(1) // 2
    mask = np.random.default_rng(1).random((B, S)) < 0.7
    got = jax.jit(lambda x: moe(x, mask, segments)[1].losses["load_balance"])(jnp.asarray(x))
    np.testing.assert_allclose(got, document_loss(x, weights_of(moe), setting_of(moe), segments, mask), rtol=1e-12)


def test_case_18_golden_values():
    """Two experts, logits (log 3, 0) and (0, log 3): scores 3/4 and 1/4, by hand."""
    x = jnp.asarray([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    # f = (3/4, 1/4), P = (5/8, 3/8): E f.P = 9/8. For k = 2, every f_e is 1/2: 1; hf's sums to k: 2.
    want = {(1, "switch"): 9 / 8, (1, "hf"): 9 / 8, (1, "megatron"): 9 / 8, (1, "deepseek_seq"): 9 / 8,
            (2, "switch"): 1, (2, "hf"): 2, (2, "megatron"): 1, (2, "deepseek_seq"): 1}
    for (k, preset), value in want.items():
        moe = MoE(2, 4, 2, router=TopK(k=k), load_balance=preset, dispatch=Ragged(), rngs=nnx.Rngs(0))
        moe.router["w_DE"][...] = math.log(3) * jnp.eye(2)
        losses = jax.jit(lambda moe, x: moe(x)[1].losses)(moe, x)
        np.testing.assert_allclose(losses["load_balance"], value, rtol=1e-6, err_msg=preset)
        np.testing.assert_allclose(losses["router_z"], math.log(4) ** 2, rtol=1e-6)
        # Summed weights: 3 x 3/4 and 3/4 for k = 1; 5/2 and 3/2 for k = 2.
        np.testing.assert_allclose(losses["importance"], 1 / 4 if k == 1 else 1 / 16, rtol=1e-6)


@pytest.mark.parametrize("preset", ["switch", "deepseek_seq"])
def test_case_14_losses_and_router_gradients_do_not_depend_on_the_mesh(preset):
    """As hf and megatron are multiples of switch, these two presets stand for all."""
    x, segments = jnp.asarray(inputs()), jnp.broadcast_to(jnp.arange(S) // 3, (B, S))
    places = {
        "alone": (None, None), "data 8": (mesh(a=8), Roles(("a",))),
        "data 4, model 2": (mesh(a=4, b=2), Roles(("a",), model=("b",))),
        "data 2, expert 4": (mesh(a=2, b=4), Roles(("a", "b"), ("b",))), "sequence": (mesh(a=4), Roles(model=("a",))),
    }
    found = {}
    for name, (where, roles) in places.items():
        if preset == "deepseek_seq" and name not in ("alone", "data 4, model 2"):
            continue
        moe = MoE(D, 32, E, load_balance=preset, mesh=where, roles=roles, rngs=nnx.Rngs(0))
        graph, state = nnx.split(moe)

        def losses(state):
            losses = nnx.merge(graph, state)(x, segment_ids=segments)[1].losses  # noqa: B023
            return losses["load_balance"] + 0.1 * losses["router_z"] + 0.3 * losses["importance"], losses

        grads, values = jax.jit(jax.grad(losses, has_aux=True))(state)
        found[name] = jax.device_get((values, grads.router["w_DE"][...]))
        assert np.linalg.norm(found[name][1]) > 0
    for name, got in found.items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12, err_msg=name),  # noqa: B023
                     got, found["alone"])


@pytest.mark.parametrize("preset", ["switch", "hf", "megatron", "deepseek_seq"])
def test_case_19_loss_rises_from_balanced_to_all_to_one(preset):
    """Token t prefers expert t mod E, the more the larger `own`; all prefer expert 0 by `one`."""
    moe = make(load_balance=preset, router=TopK(k=1), d_model=E)
    x = jnp.broadcast_to(jnp.eye(E), (2, E, E))
    run = jax.jit(lambda moe: moe(x)[1].losses["load_balance"])
    found = []
    for one in (0.0, 4.0, 8.0):
        moe.router["w_DE"][...] = 3 * jnp.eye(E) + jnp.zeros((E, E)).at[:, 0].set(one)
        found.append(float(run(moe)))
    assert found[0] == pytest.approx(1) and found[0] < found[1] < found[2]
    assert found[2] > 0.9 * E


@pytest.mark.parametrize("routing", ["random", "one"])
def test_case_29_metrics_are_the_oracles(routing):
    moe, x = make("all", "slots-tight", routing), inputs()
    x[2, 3, 4] = np.nan
    mask = np.random.default_rng(1).random((B, S)) < 0.8
    mask[2, 3] = True
    (_, aux), _ = values_and_gradients(moe, jnp.asarray(x), mask)
    mask[2, 3] = False
    x, w, setting = np.nan_to_num(x), weights_of(moe), setting_of(moe)
    d = oracle.decide(x, w, setting, oracle.Given(mask))
    scores = oracle.scores_of(np, setting.router, oracle.logits_of(np, setting.router, x[mask], w))
    loads = [np.bincount(d.experts[b][d.used[b]], minlength=E) for b in range(B)]   # a group is a sequence
    want = {
        "dropped_pairs": d.used.sum() - d.kept.sum(), "nonfinite_tokens": 1,
        "max_over_mean_load": d.pairs.max() / d.pairs.mean(), "dead_experts": (d.pairs == 0).sum(),
        "router_entropy": -(scores * np.log(scores)).sum(-1).mean(),
        "sufficient_capacity_factor": np.max(loads) / (setting.router.k * S / E),
    }
    assert aux.metrics.keys() == want.keys() and want["dropped_pairs"] > 0
    for name, value in want.items():
        np.testing.assert_allclose(aux.metrics[name], value, rtol=1e-12, err_msg=name)
    np.testing.assert_array_equal(aux.tokens_per_expert, d.pairs)
    enough = make(layout="slots-tight", dispatch=Slots(float(aux.metrics["sufficient_capacity_factor"])))
    enough.router["w_DE"][...] = jnp.asarray(w["w_DE"])
    assert jax.jit(lambda x: enough(x, mask)[1].dropped_fraction)(jnp.asarray(x)) == 0


def test_case_20_bias_moves_towards_balance_with_mean_zero():
    bias = updated_bias(jnp.asarray([0.5, -0.5, 0.0, 0.0]), jnp.asarray([10.0, 2.0, 4.0, 0.0]), 0.1)
    np.testing.assert_allclose(bias, [0.375, -0.425, -0.025, 0.075])


@pytest.mark.parametrize(("router", "numbers", "message"), [
    (TopK, {"groups": 3}, "router.groups must divide num_experts=8.*got 3"),
    (TopK, {"k": 5, "groups": 4, "groups_kept": 2},
     "router.k must be between 1 and the experts of router.groups_kept groups=4"),
    (TopK, {"k": 0}, "router.k must be between 1 and num_experts=8, got 0"),
    (NoisyTopK, {"k": 9}, "router.k must be between 1 and num_experts=8, got 9"),
    (Cosine, {"k": 9}, "router.k must be between 1 and num_experts=8, got 9"),
    (ExpertChoice, {"capacity_factor": 0.0}, "router.capacity_factor must be positive, got 0.0"),
    (Soft, {"slots_per_expert": 0}, "router.slots_per_expert must be at least 1, got 0"),
])
def test_routers_refuse_numbers_that_do_not_fit(router, numbers, message):
    with pytest.raises(ValueError, match=message):
        MoE(D, 32, E, router=router(**numbers), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("router", [ExpertChoice(), Soft()], ids=lambda router: type(router).__name__)
def test_experts_can_be_forced_only_where_tokens_choose(router):
    with pytest.raises(ValueError, match="forced_experts"):
        make(layout="slots-tight", router=router)(jnp.asarray(inputs()), forced_experts=jnp.zeros((B, S, 1), int))


def test_soft_needs_slots():
    with pytest.raises(ValueError, match="dispatch Ragged needs a router that sends whole tokens, got Soft; use Slots"):
        make(layout="ragged", router="soft")
