"""The layer equals the oracle in value and gradient, in float64, whatever the mesh, roles, router, layout, routing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from against_oracle import (
    LAYOUTS,
    PLACES,
    ROUTERS,
    B,
    D,
    E,
    S,
    check,
    check_all_routings,
    inputs,
    make,
    scalar,
    setting_of,
    values_and_gradients,
    weights_of,
)

from jaxmoe import ExpertChoice, TopK

pytestmark = pytest.mark.usefixtures("x64")
PRODUCT = [c for c in itertools.product(PLACES, ROUTERS, LAYOUTS) if c[1:] != ("soft", "ragged")]
MAIN = ("one-device", "expert", "fsdp", "all")   # with every router; other mixes of roles with top-k


def covering():
    """Some of the product in which every pair of main place and router, main place and layout, router and layout is."""
    found, layouts = [], list(LAYOUTS)
    for (i, place), (j, router) in itertools.product(enumerate(MAIN), enumerate(ROUTERS)):
        some = layouts[:2] if router == "soft" else layouts
        found.append((place, router, some[(i + j) % len(some)]))
    return found


def test_the_selection_covers_every_pair():
    pairs = lambda cases: {pair for case in cases for pair in itertools.combinations(case, 2)}  # noqa: E731
    assert pairs(covering()) == pairs(case for case in PRODUCT if case[0] in MAIN)


@pytest.mark.parametrize(("place", "router", "layout"), [
    pytest.param(*case, marks=[pytest.mark.core] if case[0] == "all" else []) for case in covering()])
def test_equals_oracle(place, router, layout):
    check_all_routings(make(place, layout, router=router))


@pytest.mark.parametrize("place", [place for place in PLACES if place not in MAIN])
def test_equals_oracle_in_other_mixes_of_roles(place):
    check_all_routings(make(place, "slots-tight"))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "router", "layout"), [c for c in PRODUCT if c not in set(covering())])
def test_equals_oracle_in_the_rest_of_the_product(place, router, layout):
    check_all_routings(make(place, layout, router=router))


@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activations(activation, layout):
    check(make(layout=layout, activation=activation), inputs())


@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
@pytest.mark.parametrize("place", ["expert", "all"])
def test_case_09_odd_sizes_and_case_17_padding_stays_out(place, layout):
    x, mask = inputs(3, 7), np.random.default_rng(1).random((3, 7)) < 0.6
    moe = make(place, layout, router=TopK(k=3))
    check(moe, x, mask)
    x = np.where(mask[..., None], x, np.nan)
    (y, aux), grads = values_and_gradients(moe, jnp.asarray(x), mask)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((y, aux, grads)))


def test_case_09_odd_experts_and_widths():
    x = inputs(1, 7, 12)
    check(make(layout="ragged", d_model=12, d_ff=36, num_experts=5, router=TopK(k=3)), x)
    check(make(layout="slots-tight", d_model=12, d_ff=36, num_experts=5, router=TopK(k=3)), x)


@pytest.mark.parametrize("router", [TopK(k=2), ExpertChoice(1.0)], ids=["topk", "expert_choice"])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_groups_of_several_sequences(group, router):
    check(make(layout="slots-tight", group=group, router=router), inputs())


def test_case_12_one_expert_is_the_dense_layer():
    moe = make(num_experts=1, router=TopK(k=1))
    w = weights_of(moe)
    x = inputs()
    dense = (jax.nn.silu(x @ w["gate"][0]) * (x @ w["up"][0])) @ w["down"][0]
    np.testing.assert_allclose(values_and_gradients(moe, jnp.asarray(x))[0][0], dense, rtol=1e-12)


@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
def test_case_22_all_to_one_and_case_27_experts_without_tokens(layout):
    aux, grads = check(make("expert", layout, "one", TopK(k=1)), inputs())
    assert float(aux.metrics["dead_experts"]) == E - 1
    assert float(aux.dropped_fraction) == (0 if layout == "ragged" else 1 - 1 / E)
    assert float(aux.metrics["sufficient_capacity_factor"]) == E
    assert not np.asarray(grads["w_up_EDF"][...])[0].any()


@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
def test_case_42_two_runs_are_bitwise_equal(layout):
    moe, x = make("all", layout), jnp.asarray(inputs())
    one, two = (values_and_gradients(moe, x) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_case_43_forced_experts_are_used_and_the_router_learns():
    forced = np.where(np.random.default_rng(2).random((B, S, 1)) < 0.5, [[[6, 7]]], -1)
    _, grads = check(make("expert", "ragged"), inputs(), forced=forced)
    assert np.linalg.norm(grads.router["w_DE"][...]) > 0


@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
def test_case_44_one_token_on_eight_devices(layout):
    aux, _ = check(make("expert", layout), inputs(1, 1))
    assert float(aux.dropped_fraction) == 0


def test_case_28_twelve_experts_on_eight_devices():
    with pytest.raises(ValueError, match="num_experts must be divisible by 8.*got 12"):
        make("expert", num_experts=12)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="token_mask must have shape"):
        make()(jnp.ones((2, 3, D)), jnp.ones((2, 4), bool))
    with pytest.raises(ValueError, match="router.k must be between 1 and num_experts=8, got 9"):
        make(router=TopK(k=9))


@pytest.mark.parametrize("router", ROUTERS)
def test_twin_has_the_numpy_oracles_gradient(router):
    moe, x, rng = make(layout="slots-tight", router=router), inputs(2, 4), np.random.default_rng(3)
    setting, w = setting_of(moe), weights_of(moe)
    given = oracle.Given(noise=rng.normal(size=(2, 4, E)) if router == "noisy_topk" else None)
    d = oracle.decide(x, w, setting, given)
    values = [forward(x, w, setting, d, given) for forward in (oracle.forward, oracle.twin)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), *values)
    f = lambda point: scalar(*oracle.twin(point["x"], point, setting, d, given))  # noqa: E731
    point = w | {"x": x}
    grads = jax.grad(f)({name: jnp.asarray(a) for name, a in point.items()})
    for _ in range(8):
        step = {name: rng.normal(size=a.shape) for name, a in point.items()}

        def along(t):
            moved = {name: point[name] + t * step[name] for name in point}  # noqa: B023
            return float(scalar(*oracle.forward(moved["x"], moved, setting, d, given)))

        h = 1e-4   # fourth order: the second-order form's truncation error is larger than the tolerance
        central = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
        assert central == pytest.approx(sum(float((grads[name] * step[name]).sum()) for name in point), rel=1e-7)
