"""Experts over rows sorted by expert."""

from functools import partial

import jax

from ..compat import vary_like
from ..kernels.grouped_matmul import Product, grouped_stages  # pyright: ignore[reportMissingImports]
from .dense import ExpertWeights, Hidden, activate, first_matrices


def grouped_experts(x_RD: jax.Array, sizes_E: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """As `experts`, for sizes_E rows of each expert; zero in rows after the last one's."""
    return grouped_stages((_up, partial(_down, activation)), x_RD, _cast(w, x_RD), sizes_E)


def grouped_up(x_RD: jax.Array, sizes_E: jax.Array, w: ExpertWeights) -> Hidden:
    """The first products, before the activation, (R, F) each."""
    return grouped_stages((_up,), x_RD, _cast(w, x_RD), sizes_E)


def grouped_down(hidden_RF: Hidden, sizes_E: jax.Array, w: ExpertWeights, activation: str) -> jax.Array:
    """The activation and the last product (R, D)."""
    return grouped_stages((partial(_down, activation),), hidden_RF, _cast(w, hidden_RF[0]), sizes_E)


def _up(x_RD: jax.Array, w: ExpertWeights, product: Product) -> Hidden:
    return tuple(product(x_RD, m) for m in first_matrices(w))


def _down(activation: str, hidden_RF: Hidden, w: ExpertWeights, product: Product) -> jax.Array:
    return product(activate(hidden_RF, activation), w.down_EFD)


def _cast(w: ExpertWeights, x: jax.Array) -> ExpertWeights:
    return vary_like(jax.tree.map(lambda a: a.astype(x.dtype), w), x)
