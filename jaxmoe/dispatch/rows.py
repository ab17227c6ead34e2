"""Moving rows between token order and a layout, by index gathers only, forward and backward."""

import jax
import jax.numpy as jnp

from ..types import SlotIndex


def _with_zero_row(x_ND: jax.Array) -> jax.Array:
    return jnp.concatenate([x_ND, jnp.zeros_like(x_ND[:1])])


@jax.custom_vjp
def pack(x_TD: jax.Array, where: SlotIndex) -> jax.Array:
    """Rows of x_TD in slot order [slots, D]; empty slots are zero."""
    K = where.slot_TK.shape[1]
    return _with_zero_row(x_TD)[where.pair_S // K]


def _pack_fwd(x_TD, where):
    return pack(x_TD, where), where


def _pack_bwd(where, g_SD):
    rows_TKD = _with_zero_row(g_SD)[where.slot_TK]
    wide = jnp.promote_types(g_SD.dtype, jnp.float32)
    return rows_TKD.astype(wide).sum(1).astype(g_SD.dtype), None


pack.defvjp(_pack_fwd, _pack_bwd)


@jax.custom_vjp
def unpack(y_SD: jax.Array, weights_TK: jax.Array, where: SlotIndex) -> jax.Array:
    """sum_k weights_TK * (row of y_SD in the pair's slot, zero if dropped), in at least float32, k in order."""
    rows_TKD = _with_zero_row(y_SD)[where.slot_TK].astype(weights_TK.dtype)
    return (weights_TK[..., None] * rows_TKD).sum(1)


def _unpack_fwd(y_SD, weights_TK, where):
    return unpack(y_SD, weights_TK, where), (y_SD, weights_TK, where)


def _unpack_bwd(saved, g_TD):
    y_SD, weights_TK, where = saved
    K = weights_TK.shape[1]
    weight_S = jnp.append(weights_TK.reshape(-1), jnp.zeros_like(weights_TK[0, 0]))[where.pair_S]
    gy_SD = weight_S[:, None] * _with_zero_row(g_TD)[where.pair_S // K]
    rows_TKD = _with_zero_row(y_SD)[where.slot_TK].astype(g_TD.dtype)
    return gy_SD.astype(y_SD.dtype), (rows_TKD * g_TD[:, None, :]).sum(-1), None


unpack.defvjp(_unpack_fwd, _unpack_bwd)
