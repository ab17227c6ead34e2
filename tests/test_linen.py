"""The Linen face computes what the nnx layer computes, with and without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

import jaxmoe

pytestmark = pytest.mark.core


def test_linen_equals_nnx_on_a_mesh():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    roles = jaxmoe.Roles(data=("d",), expert=("d",))
    x = jax.random.normal(jax.random.key(0), (8, 4, 16))
    layer = jaxmoe.linen.MoE(16, 32, 8, mesh=mesh, roles=roles)
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(1), x))["params"]
    other = jaxmoe.MoE(16, 32, 8, mesh=mesh, roles=roles, rngs=nnx.Rngs(0))
    for name, value in params.items():
        target = other.router[name.removeprefix("router_")] if name.startswith("router_") else getattr(other, name)
        target[...] = jax.device_put(value, target[...].sharding)
    alone = jaxmoe.linen.MoE(16, 32, 8)
    got, want = jax.jit(layer.apply)({"params": params}, x)[0], nnx.jit(lambda m, x: m(x))(other, x)[0]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(jax.jit(alone.apply)({"params": params}, x)[0], want, atol=1e-5)
    assert jnp.linalg.norm(want) > 0
