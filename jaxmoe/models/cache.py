"""The key-value cache of a decoder."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..mesh import Roles, axes_size


class KV(NamedTuple):
    """Keys (rotated) and values [B, L, kv heads, width] of a block; with a leading dim over groups if it is scanned."""

    k: jax.Array
    v: jax.Array


class Cache(NamedTuple):
    """What a decoder remembers: per block of its stack a `KV`; valid_BL: bool, a token is there; used: () int32."""

    blocks: tuple[KV, ...]
    valid_BL: jax.Array
    used: jax.Array


def fitting(mesh: Mesh | None, spec: P, shape: tuple[int, ...]) -> P:
    """spec without the entries whose axes' size does not divide their dim."""
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return P(*(a if a and size % axes_size(mesh, a) == 0 else None for a, size in zip(axes, shape, strict=False)))


def constrain(x: jax.Array, mesh: Mesh | None, spec: P) -> jax.Array:
    """x split as `spec` says, where its dims can be."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, fitting(mesh, spec, x.shape)))


def kv_spec(roles: Roles) -> P:
    """Of [B, L, heads, width]: batch over the batch axes, heads over the model axes."""
    return P(roles.batch_axes, None, roles.model)


def empty(mesh: Mesh | None, roles: Roles, blocks: int, shape: tuple[int, ...], dtype) -> Cache:
    """A cache without tokens. shape: of one block's keys, [B, L, heads, width] or [N, B, L, heads, width]."""
    B, L = shape[-4:-2]
    spec = P(*(None,) * (len(shape) - 4), *kv_spec(roles))

    def make():
        zeros = lambda: constrain(jnp.zeros(shape, dtype), mesh, spec)  # noqa: E731
        valid_BL = constrain(jnp.zeros((B, L), bool), mesh, P(roles.batch_axes))
        return Cache(tuple(KV(zeros(), zeros()) for _ in range(blocks)), valid_BL, constrain(jnp.int32(0), mesh, P()))

    return jax.jit(make)()


def written(buffer_BL: jax.Array, new_BS: jax.Array, start: jax.Array | int) -> jax.Array:
    """buffer with `new` from position `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(buffer_BL, new_BS.astype(buffer_BL.dtype), start, 1)
