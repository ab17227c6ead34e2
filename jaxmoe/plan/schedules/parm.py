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

from ..block import SAVED, Block
from ..cluster import Cluster
from ..plan import Plan
from ..tasks import Degrees
from . import pipemoe


def plan_s1(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
            saved: tuple[str, ...] = SAVED) -> Plan:
    """degrees: None = the fastest in simulation."""
    made = pipemoe.plan(replace(block, fused=True), cluster, degrees, slices, saved)
    return replace(made, schedule="parm-s1")


def plan_s2(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
            saved: tuple[str, ...] = SAVED) -> Plan:
    """degrees: None = the fastest in simulation."""
    made = pipemoe.plan(replace(block, fused=True, split="slots"), cluster, degrees, slices, saved)
    return replace(made, schedule="parm-s2")
