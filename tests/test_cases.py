"""Cases of tests/cases.md that no other file covers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from against_oracle import B, D, E, F, check, close, inputs, make, mesh, setting_of, skewed, weights_of
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmoe import MoE, NoisyTopK, Ragged, Roles, Slots, TopK

pytestmark = pytest.mark.usefixtures("x64")


def layer(where, roles, dispatch):
    return MoE(D, F, E, dispatch=dispatch, mesh=where, roles=roles, dtype=jnp.float64, rngs=nnx.Rngs(0))


MESHES = {
    "1": (None, None), "2": (mesh(a=2), Roles(("a",), ("a",))), "4": (mesh(a=4), Roles(("a",), ("a",))),
    "8": (mesh(a=8), Roles(("a",), ("a",))),
    "2 x data x model": (mesh(a=2, b=2, c=2), Roles(("a", "b"), ("b",), model=("c",), fsdp=("a",))),
}


@functools.partial(jax.jit, static_argnums=0)
def gradients_before_and_in(graph, state, w_DD, x):
    """Of a dense layer before the MoE layer, and of the latter."""
    def loss(state, w_DD):
        y, aux = nnx.merge(graph, state)(x @ w_DD)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() + aux.losses["load_balance"]

    return jax.grad(loss, (0, 1))(state, w_DD)


@pytest.mark.parametrize("dispatch", [Slots(1.0), Ragged()], ids=["slots", "ragged"])
def test_case_01_case_03_gradients_do_not_depend_on_expert_parallelism(dispatch):
    """Never scaled by its degree: of experts, of the router, and of a dense layer before."""
    w_DD = jnp.asarray(np.random.default_rng(1).normal(size=(D, D))) / D**0.5
    found = {}
    for name, (where, roles) in MESHES.items():
        state, before = gradients_before_and_in(*nnx.split(layer(where, roles, dispatch)), w_DD, jnp.asarray(inputs()))
        found[name] = weights_of(state) | {"before": np.asarray(before)}
    for name, grads in found.items():
        for leaf, want in found["1"].items():
            close(grads[leaf], want, f"{leaf} on {name}")
            assert np.linalg.norm(want) > 0


def test_case_07_uneven_exchange_and_case_26_overflowing_buckets():
    """A bucket holds 8 of 64 pairs: random counts, and one device that sends all it has to one other."""
    moe, x, rng = make("expert", dispatch=Ragged(0.5)), inputs(B, 32), np.random.default_rng(4)
    assert moe.spec.dispatch.bucket_rows(32, TopK(k=2), E, 8) == 8
    uneven = np.minimum(rng.geometric(0.4, (B, 32, 2)) - 1, E - 1)
    uneven[..., 1] = (uneven[..., 0] + 1 + rng.integers(0, E - 1, (B, 32))) % E
    uneven[3] = [5, 6]
    aux, _ = check(moe, x, forced=uneven)
    assert aux.dropped_fraction == 0 and aux.tokens_per_expert.max() > 100


@pytest.mark.parametrize("inside", [False, True], ids=["gradient outside", "gradient inside"])
def test_case_10_in_a_shard_map_of_the_users_own(inside):
    """The layer without a mesh, on each device's part of the batch; a capacity group is a sequence, so all is equal."""
    where, moe, x = mesh(d=8), make(layout="slots-tight"), jnp.asarray(inputs())
    graph, state = nnx.split(moe)
    state = jax.device_put(state, jax.NamedSharding(where, P()))
    w, setting = weights_of(moe), setting_of(moe)
    d = oracle.decide(np.asarray(x), w, setting)
    want = jax.grad(lambda w: (oracle.twin(x, w, setting, d)[0] ** 3).sum())(w)

    def local(state, x):
        return jax.lax.psum((nnx.merge(graph, state)(x)[0] ** 3).sum(), "d")

    run = jax.grad(local) if inside else local
    mapped = jax.shard_map(run, mesh=where, in_specs=(P(), P("d")), out_specs=P())
    grads = jax.jit(mapped if inside else jax.grad(mapped))(state, x)
    for name, got in weights_of(grads).items():
        close(got, want[name], name)


def test_case_10_a_layer_with_a_mesh_refuses_to_be_nested():
    where = mesh(d=8)
    moe = layer(where, Roles(("d",), ("d",)), Ragged())
    graph, state = nnx.split(moe)
    nested = jax.shard_map(lambda s, x: nnx.merge(graph, s)(x)[0], mesh=where, in_specs=(P(), P("d")), out_specs=P("d"))
    with pytest.raises(ValueError, match="mesh"):
        jax.jit(nested)(state, jnp.asarray(inputs()))


@pytest.mark.parametrize("dispatch", [Slots(1.0), Ragged()], ids=["slots", "ragged"])
def test_case_24_evaluation_does_not_depend_on_the_devices(dispatch):
    """Which pairs are dropped included: a token without one would have another output."""
    run = jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)
    found = []
    for where, roles in (MESHES["1"], MESHES["2"], MESHES["8"]):
        moe = layer(where, roles, dispatch)
        moe.router["w_DE"][...] = jax.device_put(
            jnp.asarray(skewed("one", {"w_DE": moe.router["w_DE"][...]})["w_DE"]), moe.router["w_DE"][...].sharding)
        y, aux = run(*nnx.split(moe), jnp.asarray(inputs()))
        found.append((np.asarray(y), float(aux.dropped_fraction)))
    for y, dropped in found:
        np.testing.assert_allclose(y, found[0][0], rtol=1e-10, atol=1e-13)
        assert dropped == found[0][1] and (dropped > 0) == isinstance(dispatch, Slots)


def test_case_25_bound_of_the_ragged_buffer():
    """min(k, local experts) * tokens * devices, however large the factor; less for small ones."""
    rows = Ragged(100.0).buffer_rows(tokens=64, router=TopK(k=8), num_experts=32, devices=8)
    assert rows == min(8, 32 // 8) * 64 * 8
    assert Ragged(1.5).buffer_rows(64, TopK(k=8), 32, 8) == 1.5 * 64 * 8
    assert Ragged(1.5).buffer_rows(64, TopK(k=8), 32, 8, shards=2) == 2 * 1.5 * 64 * 8


@pytest.mark.parametrize("router", [TopK(k=2), NoisyTopK(k=4)], ids=["k 2", "k 4"])
def test_case_45_capacity_factor_counts_k(router):
    """A trainer that does not count k has C = ceil(factor * tokens / experts): k times our factor."""
    theirs = 2.5
    assert Slots(theirs / router.k).capacity(router, 64, 8) == -(-theirs * 64 // 8)
    assert Slots(1.0).capacity(router, 64, 8) == router.k * 64 // 8
    assert "The factor counts k" in (Slots.__doc__ or "")


def test_case_46_experts_leaves_have_the_expert_dim_first():
    where = mesh(a=2, b=2, c=2)
    moe = layer(where, Roles(("a", "b"), ("b",), ("c",), ("c",), ("a",)), Slots())
    leaves = {path[0]: v for path, v in nnx.to_flat_state(nnx.state(moe, nnx.Param)) if str(path[0]).startswith("w_")}
    assert set(leaves) == {"w_up_EDF", "w_down_EFD", "w_gate_EDF"}
    for name, param in leaves.items():
        array = param.get_value()
        assert array.shape[0] == E and array.sharding.shard_shape(array.shape)[0] == E // 2, name

