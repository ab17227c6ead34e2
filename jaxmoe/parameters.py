"""Parameters that are created sharded: no device ever holds the whole of a sharded array."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, mesh: Mesh | None, spec: P = P(), mean: float = 0.0
) -> nnx.Param:
    """A parameter of N(mean, scale^2) with sharding `spec`; the same numbers whatever the mesh.

    `spec` stays with it as metadata, for code that looks at shapes without allocating.
    """
    sharding = None if mesh is None else NamedSharding(mesh, spec)
    make = jax.jit(lambda key: mean + scale * jax.random.normal(key, shape), out_shardings=sharding)
    return nnx.Param(make(rngs.params()), spec=spec)


def ones(shape: tuple[int, ...], mesh: Mesh | None) -> nnx.Param:
    """A replicated parameter of ones."""
    sharding = None if mesh is None else NamedSharding(mesh, P())
    return nnx.Param(jax.jit(lambda: jnp.ones(shape), out_shardings=sharding)(), spec=P())
