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


def experts(x_ECD: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """down(act(gate x) * up x), or down(act(up x)). With F split, the result is a partial sum."""
    act, w = ACTIVATIONS[activation], jax.tree.map(lambda a: a.astype(x_ECD.dtype), w)
    up_ECF = jnp.einsum("ecd,edf->ecf", x_ECD, w.up_EDF)
    if w.gate_EDF is None:
        hidden_ECF = act(up_ECF)
    else:
        hidden_ECF = act(jnp.einsum("ecd,edf->ecf", x_ECD, w.gate_EDF)) * up_ECF
    return jnp.einsum("ecf,efd->ecd", hidden_ECF, w.down_EFD)
