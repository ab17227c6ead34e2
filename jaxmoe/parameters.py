"""Parameters that are created sharded: no device ever holds the whole of a sharded array."""

from functools import cache
from typing import Any

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
    return nnx.Param(mean + scale * _drawn(shape, _sharding(mesh, spec))(rngs.params()), spec=spec)


def ones(shape: tuple[int, ...], mesh: Mesh | None) -> nnx.Param:
    """A replicated parameter of ones."""
    return nnx.Param(_filled(shape, _sharding(mesh, P()))(), spec=P())


def _sharding(mesh: Mesh | None, spec: P) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, spec)


@cache   # one compilation for all parameters of a shape and sharding
def _drawn(shape: tuple[int, ...], sharding: Any):
    return jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=sharding)


@cache
def _filled(shape: tuple[int, ...], sharding: Any):
    return jax.jit(lambda: jnp.ones(shape), out_shardings=sharding)
