"""Values that pass between parts, and the legend of shape letters.

B batch, S sequence, T tokens of a device, G capacity groups of a device, N tokens of a group on a device,
K choices per token, E experts, C slots per expert, Z slots of all experts, R rows, D model width, F hidden width,
H heads, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax

Array = jax.Array
Axes = tuple[str, ...]
# Tensors whose collectives can be coded: rows to experts and back; parameters, and their gradients.
ROW_CLASSES = ("dispatch", "combine")
PARAMETER_CLASSES = ("parameters", "gradients")
TENSOR_CLASSES = (*ROW_CLASSES, *PARAMETER_CLASSES)


class Tokens(NamedTuple):
    """One device's tokens, group by group.

    x_TD: zero where invalid. valid_T: bool, False = padding. index_T: position in the global batch, batch index *
    sequence length + position. segment_T: document of the token. forced_TK: experts to use, -1 = free; or None.
    """

    x_TD: Array
    valid_T: Array
    index_T: Array
    segment_T: Array
    forced_TK: Array | None


@dataclass(frozen=True)
class Groups:
    """Routing decisions are made per group of tokens, never per device.

    local: groups on one device. tokens: tokens of a group on all devices that share it. axes: mesh axes over which a
    group's tokens are split, in order. sequences: sequences of a group.
    """

    local: int
    tokens: int
    axes: Axes
    sequences: int = 1


class Routing(NamedTuple):
    """Which experts each token goes to.

    experts_TK: int32. weights_TK: combine weights. chosen_TK: bool, which choices are used. scores_TE: scores of all
    experts, used by the losses. logits_TE: raw logits. All floating values are at least float32.
    """

    experts_TK: Array
    weights_TK: Array
    chosen_TK: Array
    scores_TE: Array
    logits_TE: Array


class Mixing(NamedTuple):
    """Slots that are weighted means of tokens (Soft MoE).

    pack_GNEC: share of a token in a slot, sums to 1 over a group's tokens. unpack_GNEC: weight of a slot in a token's
    output, sums to 1 over slots. scores_TE, logits_TE: as in `Routing`, summed and log-summed over an expert's slots.
    """

    pack_GNEC: Array
    unpack_GNEC: Array
    scores_TE: Array
    logits_TE: Array


class RowIndex(NamedTuple):
    """Where each (token, choice) pair lies in a buffer of rows, and back.

    row_TK: int32, the pair's row, or `num_rows` if it has none. pair_R: int32, flat pair (token * K + choice) of a row,
    or `num_tokens * K` if the row is empty.
    """

    row_TK: Array
    pair_R: Array


class Moved(NamedTuple):
    """What a dispatch returns: outputs of the experts, and this device's pairs without a slot."""

    y_TD: Array
    dropped: Array


class Aux(NamedTuple):
    """Auxiliary results of a layer: global, and the same on every device.

    losses: {"load_balance", "router_z", "importance"}, unweighted scalars. tokens_per_expert: (E,) pairs before drops.
    dropped_fraction: pairs without a slot / pairs. metrics: "dropped_pairs" (capacity) and "nonfinite_tokens" (not sent
    to any expert), "max_over_mean_load", "dead_experts", "router_entropy" (nats), "sufficient_capacity_factor" (the
    smallest that would have dropped nothing).

    Example: ``_, aux = MoE(64, 128, 8, rngs=nnx.Rngs(0))(x_BSD); loss = 0.01 * aux.losses["load_balance"]``
    """

    losses: dict[str, Array]
    tokens_per_expert: Array
    dropped_fraction: Array
    metrics: dict[str, Array]
