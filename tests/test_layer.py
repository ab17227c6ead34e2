"""The layer equals the oracle in value and gradient, in float64, whatever the mesh, roles, layout and routing."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe import MoE, Ragged, Roles, Slots, TopK

B, S, D, F, E = 8, 8, 16, 32, 8
pytestmark = pytest.mark.usefixtures("x64")


def mesh(**axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


PLACES = {
    "one-device": lambda: (None, None),
    "expert": lambda: (mesh(d=8), Roles(data=("d",), expert=("d",))),
    "expert-fsdp": lambda: (mesh(d=8), Roles(data=("d",), expert=("d",), fsdp=("d",))),
    "data": lambda: (mesh(d=8), Roles(data=("d",))),
    "fsdp": lambda: (mesh(d=8), Roles(fsdp=("d",))),
    "model": lambda: (mesh(d=4), Roles(model=("d",))),
    "expert-shard": lambda: (mesh(a=4, b=2), Roles(data=("a", "b"), expert_shard=("b",))),
    "data-expert": lambda: (mesh(a=4, b=2), Roles(data=("a", "b"), expert=("b",))),
    "two-axes": lambda: (mesh(a=2, b=4), Roles(data=("a", "b"), expert=("a", "b"))),
    "expert-shard-model": lambda: (mesh(a=4, b=2), Roles(("a",), ("a",), ("b",), ("b",))),
    "all": lambda: (mesh(a=2, b=2, c=2), Roles(("a", "b"), ("b",), ("c",), ("c",), ("a",))),
}
LAYOUTS = {"slots-tight": Slots(1.0), "slots-roomy": Slots(8.0), "ragged": Ragged()}
ROUTINGS = ("random", "one", "empty", "ties")


def router_weights(routing, w_DE):
    """Weights that make the routing skewed; x[..., 0] is 1."""
    w_DE = np.array(w_DE)
    if routing == "ties":
        return np.zeros_like(w_DE)
    if routing == "one":
        w_DE[0, 3] += 30
    if routing == "empty":
        w_DE[0, :3] -= 30
    return w_DE


def inputs(batch=B, sequence=S, width=D):
    x = np.random.default_rng(0).normal(size=(batch, sequence, width))
    x[..., 0] = 1
    return x


def weights_of(moe):
    gate = getattr(moe, "w_gate_EDF", None)
    w = {"router": moe.router["w_DE"], "up": moe.w_up_EDF, "down": moe.w_down_EFD, "gate": gate}
    return {k: np.asarray(p[...]) for k, p in w.items() if p is not None}


def scalar(y, load_balance, z):
    return (y * jnp.cos(jnp.arange(y.shape[-1]))).sum() + load_balance + z


@nnx.jit
def values_and_gradients(moe, x, mask=None, forced=None):
    def f(moe, x):
        y, aux = moe(x, mask, forced_experts=forced)
        return scalar(y, aux.losses["load_balance"], aux.losses["router_z"]), (y, aux)

    (_, out), grads = nnx.value_and_grad(f, argnums=(0, 1), has_aux=True)(moe, x)
    return out, grads


def close(got, want, what, largest=1.0):
    error, size = np.linalg.norm(np.asarray(got) - want), np.linalg.norm(want)
    assert error <= 1e-10 * (size if size > 1e-8 * largest else 1), f"{what}: {error} of {size}"


def check(moe, x, mask=None, forced=None, activation="swiglu"):
    spec = moe.spec
    factor = spec.dispatch.capacity_factor if isinstance(spec.dispatch, Slots) else None
    w = weights_of(moe)
    d = oracle.decide(x, w["router"], spec.router.k, factor, spec.group, mask, forced)
    y, load_balance, z = oracle.forward(x, w, d, activation)
    (got, aux), (grads, gx) = values_and_gradients(moe, jnp.asarray(x), mask, forced)
    close(got, y, "y")
    close(aux.losses["load_balance"], load_balance, "load_balance")
    close(aux.losses["router_z"], z, "router_z")
    pairs = d.valid_BS.sum() * spec.router.k
    assert float(aux.dropped_fraction) == pytest.approx((pairs - d.kept_BSK.sum()) / pairs, abs=1e-12)
    want_w, want_x = jax.grad(lambda w, x: scalar(*oracle.twin(x, w, d, activation)), (0, 1))(w, jnp.asarray(x))
    largest = max(np.linalg.norm(v) for v in want_w.values())
    got_w = weights_of(grads)
    for name, want in want_w.items():
        close(got_w[name], want, name, largest)
    close(gx, want_x, "x", largest)
    return aux, grads


def make(place="one-device", layout="ragged", routing="random", **kwargs):
    where, roles = PLACES[place]()
    options = {"d_model": D, "d_ff": F, "num_experts": E, "dispatch": LAYOUTS[layout], "dtype": jnp.float64} | kwargs
    moe = MoE(**options, mesh=where, roles=roles, rngs=nnx.Rngs(0))
    w = router_weights(routing, moe.router["w_DE"][...])
    moe.router["w_DE"][...] = jax.device_put(w, moe.router["w_DE"][...].sharding)
    return moe


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", PLACES)
def test_equals_oracle(place, layout):
    moe = make(place, layout)
    for routing in ROUTINGS:   # one compiled program for all of them
        base = make("one-device", layout).router["w_DE"][...]
        moe.router["w_DE"][...] = jax.device_put(router_weights(routing, base), moe.router["w_DE"][...].sharding)
        check(moe, inputs())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activations(activation, layout):
    check(make(layout=layout, activation=activation), inputs(), activation=activation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["expert", "all"])
def test_case_09_odd_sizes_and_case_17_padding_stays_out(place, layout):
    x, mask = inputs(3, 7), np.random.default_rng(1).random((3, 7)) < 0.6
    moe = make(place, layout, router=TopK(k=3))
    check(moe, np.where(mask[..., None], x, 0), mask)
    x = np.where(mask[..., None], x, np.nan)
    (y, aux), _ = values_and_gradients(moe, jnp.asarray(x), mask, None)
    assert np.isfinite(np.asarray(y)).all() and np.isfinite(float(aux.losses["router_z"]))


def test_case_09_odd_experts_and_widths():
    x = inputs(1, 7, 12)
    check(make(layout="ragged", d_model=12, d_ff=36, num_experts=5, router=TopK(k=3)), x)
    check(make(layout="slots-tight", d_model=12, d_ff=36, num_experts=5, router=TopK(k=3)), x)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_groups_of_several_sequences(group):
    check(make(layout="slots-tight", group=group), inputs())


def test_case_12_one_expert_is_the_dense_layer():
    moe = make(num_experts=1, router=TopK(k=1))
    w = weights_of(moe)
    x = inputs()
    dense = (jax.nn.silu(x @ w["gate"][0]) * (x @ w["up"][0])) @ w["down"][0]
    np.testing.assert_allclose(moe(jnp.asarray(x))[0], dense, rtol=1e-12)


@pytest.mark.parametrize("layout", ["slots-tight", "ragged"])
def test_case_22_all_to_one_and_case_27_experts_without_tokens(layout):
    aux, grads = check(make("expert", layout, "one", router=TopK(k=1)), inputs())
    assert float(aux.metrics["dead_experts"]) == E - 1
    assert float(aux.dropped_fraction) == (0 if layout == "ragged" else 1 - 1 / E)
    assert float(aux.metrics["sufficient_capacity_factor"]) == E
    assert not np.asarray(grads["w_up_EDF"][...])[0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_42_two_runs_are_bitwise_equal(layout):
    moe, x = make("all", layout), jnp.asarray(inputs())
    one, two = (values_and_gradients(moe, x, None, None) for _ in range(2))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


def test_case_43_forced_experts_are_used_and_the_router_learns():
    forced = np.where(np.random.default_rng(2).random((B, S, 1)) < 0.5, [[[6, 7]]], -1)
    x = inputs()
    _, grads = check(make("expert", "ragged"), x, forced=np.where(forced >= 0, forced, -1))
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
        make(router=TopK(k=9))(jnp.ones((2, 3, D)))


def test_twin_has_the_numpy_oracles_gradient():
    moe, x, rng = make(), inputs(2, 3), np.random.default_rng(3)
    w = weights_of(moe)
    d = oracle.decide(x, w["router"], 2, 1.0)
    np.testing.assert_allclose(oracle.twin(x, w, d)[0], oracle.forward(x, w, d)[0], rtol=1e-12)
    grads = jax.grad(lambda w: scalar(*oracle.twin(x, w, d)))(w)
    for _ in range(8):
        step = {k: rng.normal(size=v.shape) for k, v in w.items()}
        f = lambda t: float(scalar(*oracle.forward(x, {k: w[k] + t * step[k] for k in w}, d)))  # noqa: B023, E731
        h = 1e-4   # fourth order: the second-order form's truncation error is larger than the tolerance
        central = (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)
        assert central == pytest.approx(sum(float((grads[k] * step[k]).sum()) for k in w), rel=1e-7)
