"""Collectives in turn, as data: what XLA:CPU needs beside loops and conditionals that hold collectives.

XLA:CPU starts collectives in the order of the program, and all that come from `shard_map` meet under one key. A loop or
a conditional counts as started when its first operation is: a later collective that reads nothing of its result may
overtake those inside on one device and not on another, and each then gets the other's data. Barriers do not help, as
they are gone when the program runs. GPUs issue collectives from one thread, loops included.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from ..compat import vary_like, varying_axes

Values = TypeVar("Values")


def turn(values) -> jax.Array:
    """0 or 1, once each array of values is there."""
    found = [jnp.isnan(jax.lax.stop_gradient(a)[(0,) * a.ndim].astype(jnp.float32))
             for a in jax.tree.leaves(values) if a.size]
    return sum(found, jnp.zeros((), bool)).astype(jnp.int32)


def after(values: Values, turn: jax.Array) -> Values:
    """values, bit for bit, once `turn` is there. Arrays that vary over fewer mesh axes than it do not wait."""

    def wait(a):
        if not varying_axes(turn) <= varying_axes(a):
            return a
        return jnp.where(vary_like(turn, a) < 2, a, jnp.zeros_like(a))

    return jax.tree.map(wait, values)
