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
    matrices = (w.up_EDF,) if w.gate_EDF is None else (w.gate_EDF, w.up_EDF)
    return tuple(jnp.einsum("gecd,edf->egcf", x_GECD, m.astype(x_GECD.dtype)) for m in matrices)


def experts_up_gradient(g_EGCF: Hidden, w: ExpertWeights) -> jax.Array:
    """Cotangent of x_GECD."""
    matrices = (w.up_EDF,) if w.gate_EDF is None else (w.gate_EDF, w.up_EDF)
    parts = [jnp.einsum("egcf,edf->gecd", g, m.astype(g.dtype)) for g, m in zip(g_EGCF, matrices, strict=True)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def experts_down(hidden_EGCF: Hidden, w: ExpertWeights, activation: str) -> jax.Array:
    """The activation and the last product, [G, E, C, D]."""
    act_EGCF = activate(hidden_EGCF, activation)
    return jnp.einsum("egcf,efd->gecd", act_EGCF, w.down_EFD.astype(act_EGCF.dtype))


def activate(hidden: Hidden, activation: str) -> jax.Array:
    """act(gate) * up, or act(up)."""
    first = ACTIVATIONS[activation](hidden[0])
    return first if len(hidden) == 1 else first * hidden[1]
