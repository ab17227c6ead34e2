"""A device's tokens, put in the order of their groups and back."""

import jax
import jax.numpy as jnp

from ..types import Groups, Tokens


def tokens_of(by_token: dict[str, jax.Array], groups: Groups) -> tuple[Tokens, jax.Array]:
    """Tokens group by group, by position and then sequence; and which are valid but not finite.

    by_token: "x" [B, S, D], "mask", "index", "segment" [B, S] and, where given, "forced" [B, S, K].
    A token that is not finite goes to no expert and into no statistic, and its output is NaN: it shows, alone.
    """
    pieces = {name: in_group_order(a, groups) for name, a in by_token.items()}
    finite_T = jnp.isfinite(pieces["x"]).all(-1)
    valid_T = pieces["mask"] & finite_T
    x_TD = jnp.where(valid_T[:, None], pieces["x"], 0)
    tokens = Tokens(x_TD, valid_T, pieces["index"], pieces["segment"], pieces.get("forced"))
    return tokens, pieces["mask"] & ~finite_T


def in_group_order(a_BS: jax.Array, groups: Groups) -> jax.Array:
    """[B, S, ...] as [T, ...]: group by group, by position and then sequence."""
    B, S = a_BS.shape[:2]
    return a_BS.reshape(groups.local, groups.sequences, S, -1).swapaxes(1, 2).reshape(B * S, *a_BS.shape[2:])


def outputs_of(y_TD: jax.Array, valid_T: jax.Array, bad_T: jax.Array, shape: tuple[int, int], groups: Groups):
    """y [B, S, D] from the order of `tokens_of`: 0 for padding, NaN for tokens that were not finite."""
    y_TD = jnp.where(valid_T[:, None], y_TD, jnp.where(bad_T[:, None], jnp.nan, 0))
    (B, S), D = shape, y_TD.shape[1]
    return y_TD.reshape(groups.local, S, groups.sequences, D).swapaxes(1, 2).reshape(B, S, D)
