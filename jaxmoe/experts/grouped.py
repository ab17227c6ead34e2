"""Experts as grouped matrix products over rows sorted by expert."""

import jax

from ..compat import vary_like
from ..kernels.grouped_matmul import grouped_matmul  # pyright: ignore[reportMissingImports]
from .dense import ExpertWeights, Hidden, activate


def grouped_experts(x_RD: jax.Array, sizes_E: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """As `experts`, for sizes_E rows of each expert; zero in rows after the last one's."""
    return grouped_down(grouped_up(x_RD, sizes_E, w), sizes_E, w, activation)


def grouped_up(x_RD: jax.Array, sizes_E: jax.Array, w: ExpertWeights) -> Hidden:
    """The first products, before the activation, (R, F) each."""
    matrices = (w.up_EDF,) if w.gate_EDF is None else (w.gate_EDF, w.up_EDF)
    return tuple(grouped_matmul(x_RD, vary_like(m.astype(x_RD.dtype), x_RD), sizes_E) for m in matrices)


def grouped_down(hidden_RF: Hidden, sizes_E: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """The activation and the last product (R, D)."""
    act_RF = activate(hidden_RF, activation)
    return grouped_matmul(act_RF, vary_like(w.down_EFD.astype(act_RF.dtype), act_RF), sizes_E)
