"""PipeMoE: chunks of the MoE layer in a pipeline of communication and experts. (read; see also Tutel)

    links    D0 D1 D2 D3 . C0 C1 C2 C3
    compute     E0 E1 E2 E3                U      (backward: the same with its own degree; E takes twice as long)

All dispatches come first, then all combines; experts follow chunk by chunk. The degree is the smallest that makes
communication, or experts, the bound (closed form in `closed_forms.pipemoe_degree`); here it is enumerated by
simulation, forward and backward apart. Gradients of dense parameters are reduced after everything else. No value
changes. It wins where experts take about as long as the two All-to-Alls together.
"""

from __future__ import annotations

from ..tasks import Task
from .base import Orders, Schedule, by, moe_degrees, place

FORWARD = {"dispatch_within": 1, "dispatch": 1, "expert_gather": 1, "expert_reduce": 2, "combine": 2,
           "combine_within": 2, "combine_gather": 2, "statistics": 3}
BACKWARD = {"combine_gather:grad": 1, "combine_within:grad": 1, "combine:grad": 1, "expert_reduce:grad": 1,
            "expert_gather:grad": 2, "dispatch:grad": 2, "dispatch_within:grad": 2, "token_gather:grad": 3,
            "model_scatter:grad": 3, "model_gather:grad": 3, "grad_reduce": 4}
# Input gradients of a chunk come before its weight gradients, which nothing waits for.
EXPERTS = {"encode_combine:grad": -1, "combine_split:grad": -1, "experts_down:dx": 0, "experts_up:dx": 1,
           "decode_dispatch:grad": 1, "experts_down:dw": 2, "experts_up:dw": 3}
OF_CHUNK = ("experts_up", "experts_down", "encode_combine", "combine_split", "decode_dispatch")

# Coding has the places of ScheMoE's theorem: before all dispatches, around each chunk's experts, after all combines.
# All parts of the tokens are routed before the first one's experts, so that their dispatches follow one another.
COMPUTE = {"shared_up": 1, "shared_down": 1, "decode_dispatch": 2, "experts_up": 2, "experts_down": 2,
           "encode_combine": 2, "combine_split": 2, "combine_join": 3, "decode_combine": 3, "unpack": 3, "tally": 3,
           "statistics": 4, "losses": 5}


def forward(task: Task) -> tuple:
    return (task.layer, place(task, FORWARD if task.is_collective else COMPUTE))


def backward(task: Task) -> tuple:
    """Recomputation, then the graph's order but for experts, and reductions last."""
    if task.direction == "recompute":
        return (0,)
    if task.verb == "grad_reduce":
        return (2,)
    layer = -task.layer
    if task.is_collective:
        return (1, layer, place(task, BACKWARD))
    if task.verb in OF_CHUNK:
        part = tuple(-int(n) for n in task.of.partition("@")[0].split(".")[1:])
        return (1, layer, 1, *part, place(task, EXPERTS))
    return (1, layer, 2 if task.verb in ("encode_dispatch", "pack", "route", "attn_out", "attend", "attn_in") else 0)


ORDERS = Orders(by(forward), by(backward))


SCHEDULE = Schedule("pipemoe", (ORDERS,), moe_degrees)
