"""Experts as grouped matrix products over rows sorted by expert."""

import jax

from ..compat import vary_like
from ..kernels.grouped_matmul import grouped_matmul  # pyright: ignore[reportMissingImports]
from .dense import ACTIVATIONS, ExpertWeights


def grouped_experts(x_RD: jax.Array, sizes_E: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """As `experts`, for sizes_E rows of each expert; zero in rows after the last one's."""
    act, w = ACTIVATIONS[activation], vary_like(jax.tree.map(lambda a: a.astype(x_RD.dtype), w), x_RD)
    up_RF = grouped_matmul(x_RD, w.up_EDF, sizes_E)
    if w.gate_EDF is None:
        hidden_RF = act(up_RF)
    else:
        hidden_RF = act(grouped_matmul(x_RD, w.gate_EDF, sizes_E)) * up_RF
    return grouped_matmul(hidden_RF, w.down_EFD, sizes_E)
