"""Layers on many meshes, and the check that one equals the oracle in value and gradient, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxmoe import Cosine, ExpertChoice, MoE, NoisyTopK, Ragged, Roles, Slots, Soft, TopK

B, S, D, F, E = 8, 8, 16, 32, 8


def mesh(**axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


PLACES = {
    "one-device": lambda: (None, None),
    "data": lambda: (mesh(d=8), Roles(data=("d",))),
    "fsdp": lambda: (mesh(d=8), Roles(fsdp=("d",))),
    "model": lambda: (mesh(d=4), Roles(model=("d",))),
    "expert": lambda: (mesh(d=8), Roles(data=("d",), expert=("d",))),
    "expert-shard": lambda: (mesh(a=4, b=2), Roles(data=("a", "b"), expert_shard=("b",))),
    "data-expert": lambda: (mesh(a=4, b=2), Roles(data=("a", "b"), expert=("b",))),
    "all": lambda: (mesh(a=2, b=2, c=2), Roles(("a", "b"), ("b",), ("c",), ("c",), ("a",))),
    "expert-fsdp": lambda: (mesh(d=8), Roles(data=("d",), expert=("d",), fsdp=("d",))),
    "two-axes": lambda: (mesh(a=2, b=4), Roles(data=("a", "b"), expert=("a", "b"))),
    "expert-shard-model": lambda: (mesh(a=4, b=2), Roles(("a",), ("a",), ("b",), ("b",))),
}
LAYOUTS = {"slots-tight": Slots(1.0), "slots-roomy": Slots(8.0), "ragged": Ragged()}
ROUTINGS = ("random", "one", "empty", "ties")
ROUTERS = {
    "topk": TopK(k=2),
    "noisy_topk": NoisyTopK(k=2),
    "cosine": Cosine(k=2),
    "expert_choice": ExpertChoice(capacity_factor=2.0),
    "soft": Soft(slots_per_expert=2),
}


def skewed(routing, w):
    """A router's weights for such a routing; x[..., 0] is 1."""
    w = {name: np.array(a) for name, a in w.items()}
    if "v_RE" in w:   # cosine: a large row 0 points all tokens at the same experts
        if routing == "ties":
            w["w_DR"], w["v_RE"] = np.zeros_like(w["w_DR"]), np.zeros_like(w["v_RE"])
            w["w_DR"][0, 0] = w["v_RE"][0] = 1
        elif routing != "random":
            w["w_DR"][0] += 30 if routing == "one" else -30
        return w
    name = "phi_DEC" if "phi_DEC" in w else "w_DE"
    if routing == "ties":
        w[name] = np.zeros_like(w[name]) if name == "w_DE" else np.ones_like(w[name])
    if routing == "one":
        w[name][0, 3] += 8
    if routing == "empty":
        w[name][0, :3] -= 8
    return w


def inputs(batch=B, sequence=S, width=D, seed=0):
    x = np.random.default_rng(seed).normal(size=(batch, sequence, width))
    x[..., 0] = 1
    return x


def make(place="one-device", layout="ragged", routing="random", router="topk", **kwargs):
    """A layer on a mesh, with the same random weights everywhere, also where they start at zero."""
    where, roles = PLACES[place]()
    options = {"d_model": D, "d_ff": F, "num_experts": E, "dispatch": LAYOUTS[layout], "dtype": jnp.float64,
               "router": ROUTERS.get(router, router)} | kwargs
    moe = MoE(**options, mesh=where, roles=roles, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(5)
    for _, param in sorted(moe.router.items()):
        set_to(param, param[...] + 0.1 * rng.normal(size=param.shape))
    if moe.bias is not None:
        set_to(moe.bias, 0.1 * rng.normal(size=moe.bias.shape))
    set_router(moe, skewed(routing, router_of(moe)))
    return moe


def set_to(param, value):
    param[...] = jax.device_put(jnp.asarray(value, param.dtype), param[...].sharding)


def set_router(moe, w):
    for name, value in w.items():
        set_to(moe.router[name], value)


def router_of(moe):
    return {name: np.asarray(param[...]) for name, param in moe.router.items()}


def weights_of(moe):
    """All parameters of a layer, or their gradients, under the oracle's names."""
    found = {}
    for prefix, part in (("", moe), ("shared_", getattr(moe, "shared", None))):
        params = {name: getattr(part, f"w_{name}", None) for name in ("up_EDF", "down_EFD", "gate_EDF")}
        found |= {prefix + name[:-4]: np.asarray(p[...]) for name, p in params.items() if p is not None}
    return router_of(moe) | found


def setting_of(moe):
    spec = moe.spec
    factor = spec.dispatch.capacity_factor if isinstance(spec.dispatch, Slots) else None
    return oracle.Setting(spec.router, spec.num_experts, factor, spec.group, spec.activation)


def noise_of(key, batch, sequence, num_experts=E):
    """What a router adds: a function of the key and the token's place in the global batch."""
    draw = lambda i: jax.random.normal(jax.random.fold_in(key, i), (num_experts,), jnp.float64)  # noqa: E731
    return np.array([[draw(b * sequence + s) for s in range(sequence)] for b in range(batch)])


def scalar(y, losses):
    """A loss whose gradient is another number in each element of y."""
    return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() + sum(losses.values())


def values_and_gradients(moe, x, mask=None, forced=None, key=None):
    """(y, aux), (gradients as a state of the layer, gradient of x)."""
    return _values_and_gradients(*nnx.split(moe), x, mask, forced, key)


@functools.partial(jax.jit, static_argnums=0)
def _values_and_gradients(graph, state, x, mask, forced, key):
    def f(state, x):
        y, aux = nnx.merge(graph, state)(x, mask, forced_experts=forced, key=key)
        return scalar(y, aux.losses), (y, aux)

    (_, out), grads = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(state, x)
    return out, grads


@functools.partial(jax.jit, static_argnums=2)
def twin_gradients(w, x, setting, d, given):
    return jax.grad(lambda w, x: scalar(*oracle.twin(x, w, setting, d, given)), (0, 1))(w, x)


def close(got, want, what, largest=1.0):
    error, size = np.linalg.norm(np.asarray(got) - want), np.linalg.norm(want)
    assert error <= 1e-10 * (size if size > 1e-8 * largest else 1), f"{what}: {error} of {size}"


def check(moe, x, mask=None, forced=None, key=None):
    """Values, losses, drops and every gradient are the oracle's; returns aux and gradients."""
    w, setting = weights_of(moe), setting_of(moe)
    noise = None if key is None else noise_of(key, *x.shape[:2], setting.num_experts)
    given = oracle.Given(mask, forced, None if moe.bias is None else np.asarray(moe.bias[...]), noise)
    d = oracle.decide(x, w, setting, given)
    y, losses = oracle.forward(x, w, setting, d, given)
    (got, aux), (grads, gx) = values_and_gradients(moe, jnp.asarray(x), mask, forced, key)
    close(got, y, "y")
    for name, want in losses.items():
        close(aux.losses[name], want, name)
    dropped = (d.used.sum() - d.kept.sum()) / max(d.used.sum(), 1)
    assert float(aux.dropped_fraction) == pytest.approx(dropped, abs=1e-12)
    want_w, want_x = twin_gradients(w, jnp.asarray(x), setting, d, given)
    largest = max(np.linalg.norm(v) for v in want_w.values())
    got_w = weights_of(grads)
    for name, want in want_w.items():
        close(got_w[name], want, name, largest)
    close(gx, want_x, "x", largest)
    return aux, grads


def check_all_routings(moe, x=None, key=None):
    """One compiled program for all of them."""
    x, w = inputs() if x is None else x, router_of(moe)
    for routing in ROUTINGS:
        set_router(moe, skewed(routing, w))
        check(moe, x, key=key)
    set_router(moe, w)
