"""Values that pass between parts, and the legend of shape letters.

B batch, S sequence, T tokens of one device, G capacity groups of one device, N tokens of one group, K choices per
token, E experts, C slots per expert, D model width, F expert hidden width, H heads, V vocabulary.
"""

from typing import NamedTuple

import jax

Array = jax.Array


class Routing(NamedTuple):
    """What a router decided.

    experts_TK: int32, chosen experts, best first. weights_TK: combine weights. scores_TE: scores of all experts, used
    by the losses. logits_TE: raw logits. All floating values are at least float32.
    """

    experts_TK: Array
    weights_TK: Array
    scores_TE: Array
    logits_TE: Array


class SlotIndex(NamedTuple):
    """Where each (token, choice) pair lies in a slot buffer, and back.

    slot_TK: int32, flat slot of a pair, or `num_slots` if dropped. pair_S: int32, flat pair (token * K + choice) of a
    slot, or `num_tokens * K` if the slot is empty. needed: largest load of one expert in one group, over all groups.
    """

    slot_TK: Array
    pair_S: Array
    dropped: Array
    needed: Array


class Aux(NamedTuple):
    """Auxiliary results of a layer: global, and the same on every device.

    losses: {"load_balance", "router_z"}, unweighted scalars. tokens_per_expert: (E,) pairs before drops.
    dropped_fraction: dropped pairs / pairs. metrics: further scalars for monitoring.
    """

    losses: dict[str, Array]
    tokens_per_expert: Array
    dropped_fraction: Array
    metrics: dict[str, Array]
