"""An estimate of the memory that a plan takes on one device (ours), for plans to be chosen under a device's limit.

It counts what a training step keeps from its start to its end: parameters and their gradients in float32, Adam's two
moments, and what the plan saves of every segment for the backward pass; and the largest set of values that is live at
once while a segment runs in the plan's order, gathered parameters and cotangents included. Not counted: what lies
outside the stack unless it is given (`outside`), logits and the loss, the compiler's own copies and fragmentation.
`jaxmoe prove` says what XLA allocates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from ..types import ROW_CLASSES
from .block import Block
from .tasks import Pass, TaskGraph, family

GRADIENT, STATE, WHOLE = 4, 8, 4   # bytes a parameter: float32 gradient, Adam's moments, float32 parameter


class Memory(NamedTuple):
    """Bytes on one device, by what they hold."""

    parameters: float
    gradients: float
    optimizer: float
    saved: float
    working: float

    @property
    def total(self) -> float:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / 1e9:.2f}" for name, value in self._asdict().items())
        return f"{self.total / 1e9:.2f} GB ({parts})"


def estimate(block: Block, graph: TaskGraph, forward: Sequence[str], backward: Sequence[str],
             outside: float = 0.0) -> Memory:
    """forward, backward: issue orders. outside: parameters that a device stores outside of the stack."""
    stored = outside + block.layers * sum(p.size / block.size(p.gather) for p in block.params)
    there, back = (bytes_of(block, p) for p in (graph.forward, graph.again))
    given = {v for t in graph.backward.tasks for v in t.reads} - set(graph.backward.writers)
    names = _names(block)
    saved = sum(back(v) for v in given if ":" not in v and v.partition("@")[0] not in names)
    gradients = {f"d:{name}@{layer}" for name in names for layer in range(block.segment)}
    working = max(live(graph.forward, forward, there), live(graph.backward, backward, back, gradients))
    return Memory(WHOLE * stored, GRADIENT * stored, STATE * stored, saved * block.layers / block.segment, working)


def live(pass_: Pass, order: Sequence[str], size: Callable[[str], float], results: Set[str] = frozenset()) -> float:
    """Most bytes of values that are there at once, each from the task that makes it to the last that reads it, or to
    the end if it is one of the results. What is pending of the segment above is there from the start."""
    last = {v: name for name in order for v in (*pass_.by_name[name].writes, *pass_.by_name[name].reads)}
    there = {v for v in last if v.startswith("pending:")}
    now = most = sum(map(size, there))
    for name in order:
        task = pass_.by_name[name]
        made = set(task.writes) - there
        there |= made
        now += sum(map(size, made))
        most = max(most, now)
        over = {v for v in (*task.reads, *task.writes) if last[v] == name and v not in results} & there
        there -= over
        now -= sum(map(size, over))
    return most


def bytes_of(block: Block, pass_: Pass) -> Callable[[str], float]:
    """Value or cotangent -> bytes. pass_: forward; its values of one family share what a layer has of it."""
    whole = _layer_bytes(block)
    values = {v for t in pass_.tasks for v in (*t.reads, *t.writes)}
    parts = Counter((family(v), v.partition("@")[2]) for v in values)
    params = _names(block)

    def size(value: str) -> float:
        bare = value.removeprefix("d:").removeprefix("pending:")
        name, _, layer = bare.partition("@")
        if name in params:
            return params[name] * (block.bytes_per_value if bare == value else GRADIENT)
        return whole.get(family(bare), 0.0) / parts.get((family(bare), layer), 1)

    return size


def _names(block: Block) -> dict[str, int]:
    return {p.name: p.size for p in block.params}


def _layer_bytes(b: Block) -> dict[str, float]:
    """Family -> bytes of all its values in one layer; families that are left out are small."""
    m, q = b.size(b.role("model")), b.size(b.exchanges[1])
    tokens, rows = b.tokens, b.sent_rows
    heads, kv_heads = tokens * b.heads * b.head_dim, tokens * b.kv_heads * b.head_dim
    stream, sent = tokens * b.d_model, rows * b.copies * b.d_model
    coded = sum(name in ROW_CLASSES for name, _ in b.codec)   # each with its rows, to be sent if need be
    values = {"x": stream, "h": stream, "n": stream, "shared": stream, "xg": stream * m, "u": stream * m,
              "tokens": stream * m, "n_all": stream * m,
              "q": heads, "k": kv_heads, "v": kv_heads, "o": heads,
              "slots": rows * b.d_model, "back": rows * b.sharers * b.d_model, "coded": 2 * sent * coded,
              "came": sent * (coded + (b.sharers > 1)), "near": 2 * sent, "sent": sent, "recv": sent, "out": sent,
              "met": rows * b.sharers * b.d_model, "rows": sent * q, "part": sent * q,
              "hidden": rows * b.d_ff * (2 if b.gated else 1),
              "shared_hidden": tokens * b.d_ff * b.shared_experts * (2 if b.gated else 1)}
    routed = {"weights": tokens * b.k, "choice": tokens * b.k, "scores": tokens * b.num_experts,
              "logits": tokens * b.num_experts}
    return {f: n * b.bytes_per_value for f, n in values.items()} | {f: 4.0 * n for f, n in routed.items()}
