"""Parm's S1: one All-to-All to every part of every expert, and no collective inside the node. (layer order read)

    links    D                 C            D, C over expert and expert_shard at once
    compute     E (partial)        sum U

A block of rows goes to all devices that hold a part of its expert, so that none gathers; their partial outputs come
back and are summed where they arrive, so that none reduces (EP & ESP All-to-All). It sends as many times the bytes
between nodes as an expert has parts, and holds both links. S1 gates a slice of the tokens on each device of a model
group and gathers them afterwards: here activations are split so between attention and MoE anyway (`model_scatter`,
`model_gather`), and routing decisions are made for the whole group, so that, unlike in the paper, no more is dropped
than without it. S2, which splits slots instead because all devices of the group have all tokens, has then nothing left
to split or to gather. Chunks and order are PipeMoE's (ours; the paper has one chunk). No value changes.
It wins where collectives inside a node are slow or start slowly, and experts have few parts.
"""

from __future__ import annotations

from dataclasses import replace

from . import pipemoe
from .base import Schedule, moe_degrees

SCHEDULE = Schedule("parm-s1", (pipemoe.ORDERS,), moe_degrees, cut=lambda block: replace(block, fused=True))
