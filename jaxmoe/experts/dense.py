"""Experts as batched matrix products over equally many rows each."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
}


class ExpertWeights(NamedTuple):
    """up_EDF, down_EFD, and gate_EDF for gated units (None otherwise). F may be one shard of the hidden width."""

    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EDF: jax.Array | None = None


Hidden = tuple[jax.Array, ...]   # before the activation: (gate, up), or (up,)


def experts(x_ECD: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """down(act(gate x) * up x), or down(act(up x)). With F split, the result is a partial sum."""
    return experts_down(experts_up(x_ECD[None], w), w, activation)[0]


def experts_up(x_GECD: jax.Array, w: ExpertWeights) -> Hidden:
    """The first products of each expert, before the activation, as [E, G, C, F]."""
    G, E, C, _ = x_GECD.shape
    x_ERD = _by_expert(x_GECD)
    return tuple(jnp.einsum("erd,edf->erf", x_ERD, m.astype(x_ERD.dtype)).reshape(E, G, C, -1)
                 for m in first_matrices(w))


def experts_up_gradient(g_EGCF: Hidden, w: ExpertWeights) -> jax.Array:
    """Cotangent of x_GECD."""
    E, G, C, F = g_EGCF[0].shape
    parts = [jnp.einsum("erf,edf->erd", g.reshape(E, -1, F), m.astype(g.dtype))
             for g, m in zip(g_EGCF, first_matrices(w), strict=True)]
    return sum(parts[1:], parts[0]).reshape(E, G, C, -1).swapaxes(0, 1)


def experts_down(hidden_EGCF: Hidden, w: ExpertWeights, activation: str) -> jax.Array:
    """The activation and the last product, [G, E, C, D]."""
    act_EGCF = activate(hidden_EGCF, activation)
    E, G, C, F = act_EGCF.shape
    out_ERD = jnp.einsum("erf,efd->erd", act_EGCF.reshape(E, -1, F), w.down_EFD.astype(act_EGCF.dtype))
    return out_ERD.reshape(E, G, C, -1).swapaxes(0, 1)


def _by_expert(x_GECD: jax.Array) -> jax.Array:
    """Rows of each expert in one dim: XLA:CPU multiplies two dims of rows much more slowly."""
    return x_GECD.swapaxes(0, 1).reshape(x_GECD.shape[1], -1, x_GECD.shape[3])


def first_matrices(w: ExpertWeights) -> tuple[jax.Array, ...]:
    """Of the products before the activation, in the order of `Hidden`."""
    return (w.up_EDF,) if w.gate_EDF is None else (w.gate_EDF, w.up_EDF)


def activate(hidden: Hidden, activation: str) -> jax.Array:
    """act(gate) * up, or act(up)."""
    first = ACTIVATIONS[activation](hidden[0])
    return first if len(hidden) == 1 else first * hidden[1]
