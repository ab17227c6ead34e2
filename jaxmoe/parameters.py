"""Parameters that are created sharded: no device ever holds the whole of a sharded array."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, mesh: Mesh | None, spec: P = P()) -> nnx.Param:
    """A parameter of N(0, scale^2) with sharding `spec`; the same numbers whatever the mesh."""
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    make = jax.jit(lambda key: scale * jax.random.normal(key, shape), out_shardings=sharding)
    return nnx.Param(make(rngs.params()))


def ones(shape: tuple[int, ...], mesh: Mesh | None) -> nnx.Param:
    sharding = None if mesh is None else NamedSharding(mesh, P())
    return nnx.Param(jax.jit(lambda: jnp.ones(shape), out_shardings=sharding)())
