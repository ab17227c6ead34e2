"""Parm: one All-to-All to every part of every expert, and no collective inside the node. (layer order read)

    S1  links    D                  C           D, C over expert and expert_shard at once
        compute     E (partial)       sum U
    S2  inter           D           C1 C2 C3    C in steps (SAA): each one's slots are gathered over `model`
        intra    t      D           C0 m0 m1 m2 m3      while the next step flies; t: tokens are gathered first
        compute     gate   E (partial)            U

A block of rows goes to all devices that hold a part of its expert, so that none gathers; their partial outputs come
back and are summed where they arrive, so that none reduces (EP & ESP All-to-All). It sends as many times the bytes
between nodes as an expert has parts, and holds both links. Chunks and order are PipeMoE's (ours; the paper has one
chunk). What is forced is that order, SAA's too; inside a task all is XLA's.

S1 gates a slice of the tokens on each device of a `model` group and gathers them afterwards: activations are split so
between attention and MoE anyway (`model_scatter`, `model_gather`). Routing decisions are made for the whole group, so
that, unlike in the paper, no more is dropped than without it; the price is that each device has room for all slots
that its tokens might fill, up to the group's C of an expert.

S2 gates all of the group's tokens on each device, which sends C / n_MP of every expert's slots. In the paper each
device has all tokens before the gate and after it; here they are gathered before it, and each device puts together its
own alone (ours). So the stream between layers stays split, and is saved so, for one more gather of B L M forward, which
the backward pass repeats and transposes. The gate's product and norm are done n_MP times. A step of SAA goes to all
devices that hold the same experts (ours), and is never coded.

No value changes in either. S1 wins where it has no room to spare (nothing can be dropped), as it gathers less; S2 where
a group's C is much less than what its devices would hold each. Both win where collectives inside a node are slow or
start slowly, and experts have few parts. "auto" tries both, and S2's split without the fused All-to-All.
"""

from __future__ import annotations

from dataclasses import replace

from . import pipemoe
from .base import Schedule, moe_degrees

S1 = Schedule("parm-s1", (pipemoe.ORDERS,), moe_degrees, cut=lambda block: replace(block, fused=True))
S2 = Schedule("parm-s2", (pipemoe.ORDERS,), moe_degrees, cut=lambda block: replace(block, fused=True, split="slots"))
