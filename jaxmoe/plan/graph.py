"""The task graph of a segment of transformer blocks: what must be done, forward and backward.

    x ─ attn_in ─ attend ─ attn_out ─ h ─ route ─ pack ─ dispatch ─ experts_up ─ experts_down ─ combine ─ unpack ─ x
         │                    │                              │                        │
         model_gather         model_scatter                  expert_gather            expert_reduce     (where split)

MoE work is cut along slots (`chunk="slots"`: routing and drops are those of the uncut layer), or whole token parts are
cut along the batch or the sequence. A value is named family.part[.chunk]@layer, its cotangent "d:" + that. Values that
a backward task needs and that are not saved are recomputed by tasks of the backward pass. Gradients of parameters are
reduced one segment later ("pending"), so that a schedule can place them anywhere in the pass.
"""

from __future__ import annotations

from .backward import backward_pass, reductions
from .block import Block
from .forward import forward_pass
from .tasks import Degrees, TaskGraph


def task_graph(block: Block, degrees: Degrees, saved: tuple[str, ...], slices: int) -> TaskGraph:
    """saved: names of families to keep for the backward pass. Raises ValueError if the block cannot be cut so."""
    block.check_degrees(degrees)
    there, back = (degrees.moe_forward, degrees.dense_forward), (degrees.moe_backward, degrees.dense_backward)
    return TaskGraph(forward_pass(block, *there), backward_pass(block, *back, tuple(saved), slices),
                     forward_pass(block, *back), reductions(block, slices))
