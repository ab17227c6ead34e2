"""Moving rows between token order and a layout, by index gathers only, forward and backward.

The transpose of a gather is a scatter-add, whose order of sums is not fixed; as every row belongs to one pair of a
token and a choice, the inverse index turns it into a gather and a sum over choices, in order. So two runs agree bit for
bit.
"""

import jax
import jax.numpy as jnp

from ..types import RowIndex

UNROLLED_CHOICES = 8


def rows_at(x_RD: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x_RD; an index of R points at a row of zeros, which needs no copy of x_RD that holds one."""
    return x_RD.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def sum_over_choices(rows_RD, row_TK, weights_TK=None) -> jax.Array:
    """sum_k weights_TK * rows_RD[row_TK] in at least float32, k in order; without weights, the sum of the rows."""
    K, num_rows = row_TK.shape[1], rows_RD.shape[0]
    wide = jnp.promote_types(rows_RD.dtype, jnp.float32)

    def term(row_T, weight_T):
        rows_TD = rows_at(rows_RD, row_T).astype(wide)
        return rows_TD if weight_T is None else weight_T[:, None].astype(wide) * rows_TD

    total_TD = term(row_TK[:, 0], None if weights_TK is None else weights_TK[:, 0])
    if K <= UNROLLED_CHOICES:
        for k in range(1, K):
            total_TD = total_TD + term(row_TK[:, k], None if weights_TK is None else weights_TK[:, k])
        return total_TD
    # Many choices of which few are used (expert choice): stop after the last one in use.
    used = jnp.where(row_TK < num_rows, jnp.arange(1, K + 1), 0).max()
    at = lambda a, k: None if a is None else jax.lax.dynamic_index_in_dim(a, k, 1, keepdims=False)  # noqa: E731
    return jax.lax.fori_loop(1, used, lambda k, total: total + term(at(row_TK, k), at(weights_TK, k)), total_TD)


@jax.custom_vjp
def pack(x_TD: jax.Array, where: RowIndex) -> jax.Array:
    """Rows of x_TD in the layout's order [R, D]; empty rows are zero."""
    return rows_at(x_TD, where.pair_R // where.row_TK.shape[1])


def _pack_fwd(x_TD, where):
    return pack(x_TD, where), where


def _pack_bwd(where, g_RD):
    return sum_over_choices(g_RD, where.row_TK).astype(g_RD.dtype), None


pack.defvjp(_pack_fwd, _pack_bwd)


@jax.custom_vjp
def unpack(y_RD: jax.Array, weights_TK: jax.Array, where: RowIndex) -> jax.Array:
    """sum_k weights_TK * (the pair's row of y_RD, zero if it has none), in at least float32, k in order."""
    return sum_over_choices(y_RD, where.row_TK, weights_TK)


def _unpack_fwd(y_RD, weights_TK, where):
    return unpack(y_RD, weights_TK, where), (y_RD, weights_TK, where)


def _unpack_bwd(saved, g_TD):
    y_RD, weights_TK, where = saved
    K = weights_TK.shape[1]
    weight_R = jnp.append(weights_TK.reshape(-1), jnp.zeros_like(weights_TK[0, 0]))[where.pair_R]
    g_RD = rows_at(g_TD, where.pair_R // K)
    # <y, g> row by row, then one number a pair is gathered instead of K rows a token.
    dot_R = (y_RD.astype(g_TD.dtype) * g_RD).sum(-1)
    g_weights_TK = jnp.append(dot_R, jnp.zeros_like(dot_R[:1]))[where.row_TK]
    return (weight_R[:, None] * g_RD).astype(y_RD.dtype), g_weights_TK.astype(weights_TK.dtype), None


unpack.defvjp(_unpack_fwd, _unpack_bwd)
