"""SP-MoE: chunks along the sequence overlap with this MoE layer and with the one before. (abstract; order is derived)

    layer l      l+1          p = 4, q = 4, one expert chunk behind each attention chunk (1A1M)
    A0 A1 E0 A2 E1 A3 E2 E3 | A0 A1 E0 A2 ...    compute
    .  D0 D1 C0 D2 C1 D3 C2   C3 D0 D1 C0 ...    links; C3 of layer l beside A0 of layer l+1

Attention chunk i needs keys and values of chunks up to i only; MoE is token-wise. Degrees (p, q) of attention and MoE,
and which runs first: all attention, or experts one or two attention chunks behind (1A1M, 2A1M); all by simulation.
The backward pass is the same from the other end, chunks reversed. A segment has two layers where the stack allows it,
as nothing flies over its border. Each chunk is routed apart, so nothing may be dropped (the block refuses otherwise);
statistics and losses are those of the whole sequence. Order and spans are forced; no value changes.
It wins where one sequence a device is long: no other cut leaves attention anything to overlap with.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..block import Block
from ..orders import behind, fed, fixed
from ..tasks import Pass, Task
from .base import SLICES, Orders, Schedule, all_degrees, place

ATTENTION = {"attn_in": 0, "attend": 1, "attn_out": 2,
             "attn_out:dx": 0, "attend:grad": 1, "attn_in:dx": 2, "attn_out:dw": 3, "attn_in:dw": 4}
EXPERTS = {"shared_up": 0, "shared_down": 1, "experts_up": 2, "experts_down": 3,
           "shared_down:dx": 0, "shared_up:dx": 1, "experts_down:dx": 2, "experts_up:dx": 3,
           "shared_down:dw": 4, "shared_up:dw": 5, "experts_down:dw": 6, "experts_up:dw": 7}
# What gives links work: it runs as soon as it can.
EAGER = {"route": 1, "pack": 1, "tally": 1, "encode_dispatch": 1, "encode_combine": 1, "combine_split": 1,
         "unpack:grad": 1, "combine_join:grad": 1, "decode_combine:grad": 1, "decode_dispatch:grad": 1}
LAGS = (1, 2, 99)   # 1A1M, 2A1M, all attention first


def forward(pass_: Pass, lag: int) -> tuple[str, ...]:
    attention, experts = groups(pass_, ATTENTION), groups(pass_, EXPERTS)
    rows = [name for a, e in zip(attention, experts, strict=True) for name in behind(a, e, lag)]
    return fed(pass_, rows, _eager)


def backward(pass_: Pass, lag: int) -> tuple[str, ...]:
    """Attention of a layer with the experts of the layer below, last chunks first; slices spread over all."""
    attention = [a[::-1] for a in groups(pass_, ATTENTION)[::-1]]
    experts = [e[::-1] for e in groups(pass_, EXPERTS)[::-1]]
    pairs = zip(attention, [*experts[1:], []], strict=True)
    rows = [*behind([], experts[0], lag), *(name for a, e in pairs for name in behind(a, e, lag))]
    return fed(pass_, _spread([t.name for t in pass_.tasks if t.verb == "grad_reduce"], rows), _eager)


def groups(pass_: Pass, ranks: dict[str, int]) -> list[list[list[str]]]:
    """Names of the tasks of these verbs: by layer, by chunk, in the order of ranks."""
    found: dict[int, dict[tuple, list[Task]]] = {t.layer: {} for t in pass_.tasks}
    for t in pass_.tasks:
        if place(t, ranks, -1) >= 0:
            found[t.layer].setdefault(_part(t), []).append(t)
    named = lambda tasks: [t.name for t in sorted(tasks, key=lambda t: place(t, ranks))]  # noqa: E731
    return [[named(found[layer][i]) for i in sorted(found[layer])] for layer in sorted(found)]


def _part(task: Task) -> tuple[int, ...]:
    """Part of the tokens and chunk of its slots."""
    return (*map(int, task.name.partition("@")[0].split(".")[1:]), 0)[:2]


def _eager(task: Task) -> bool:
    return task.is_collective or place(task, EAGER) > 0


def _spread(slices: list[str], rows: list[str]) -> list[str]:
    """Slices at equal distances among the rows, the first one first."""
    at = {i * len(rows) // len(slices): name for i, name in enumerate(slices)}
    merged = [name for i, row in enumerate(rows) for name in ((at[i], row) if i in at else (row,))]
    return merged + [s for s in slices if s not in set(merged)]


def cut(block: Block) -> Block:
    """Along the sequence, two layers together where the stack allows it."""
    segment = 2 if block.segment == 1 and block.layers % 2 == 0 else block.segment
    return replace(block, chunk="sequence", segment=segment)


FORWARD = tuple(fixed(partial(forward, lag=lag)) for lag in LAGS)
BACKWARD = tuple(fixed(partial(backward, lag=lag)) for lag in LAGS)
ORDERS = tuple(Orders(f, b) for f in FORWARD for b in BACKWARD)
SCHEDULE = Schedule("sp-moe", ORDERS, all_degrees, SLICES, cut)
