"""Which tensor classes are coded, and how: static, from shapes and a cluster's costs, so the same on every rank.

A class is coded iff t_encode + α + β wire + t_decode < α + β n, summed over its collectives in a layer (derived; n:
bytes uncoded, wire: `codec.wire_bytes`; rule and costs are the plan's own: `cost.seconds` of the tasks with and without
a format). Nothing else decides, but for `min_bytes` where the config gives one. What overlap hides is not counted:
schedule "auto" plans without coding too. "auto" codes rows only if blocks of the formats lie within rows: rows differ
in scale, which blocks of several do not bear (measured: docs/codec.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .. import codec as coder
from ..types import ROW_CLASSES, TENSOR_CLASSES
from .block import Block
from .cluster import Cluster
from .cost import seconds
from .graph import task_graph
from .tasks import Degrees, Task

VERBS = {
    "dispatch": ("encode_dispatch", "dispatch", "decode_dispatch"),
    "combine": ("encode_combine", "combine", "decode_combine"),
    "parameters": ("param_gather",), "gradients": ("grad_reduce",),
}
TRIED = ("x3p", "x4s")   # by "auto"


@dataclass(frozen=True)
class Choice:
    """How one class of tensors is coded. codec: format, None = uncoded. bytes: uncoded, that one device sends in a
    layer. seconds: format, or "off", -> modelled, of a layer and one direction. why: for people."""

    tensors: str
    codec: str | None
    bytes: float
    seconds: Mapping[str, float]
    why: str


def choose(block: Block, cluster: Cluster, asked: Mapping[str, str], min_bytes: int = 0,
           degrees: Degrees | None = None) -> tuple[Choice, ...]:
    """asked: tensor class -> "auto", "off" or a format. degrees: None = one chunk."""
    degrees = degrees or Degrees()
    return tuple(_choice(block, cluster, name, asked[name], min_bytes, degrees) for name in TENSOR_CLASSES)


def codec_of(choices: tuple[Choice, ...]) -> tuple[tuple[str, str], ...]:
    """What a block holds."""
    return tuple((c.tensors, c.codec) for c in choices if c.codec is not None)


def as_planned(choices: tuple[Choice, ...], block: Block) -> tuple[Choice, ...]:
    """The choices, but for what a plan of the block leaves uncoded."""
    coded = dict(block.codec)
    other = lambda c: replace(c, codec=coded.get(c.tensors), why="as the plan has it")  # noqa: E731
    return tuple(c if c.codec == coded.get(c.tensors) else other(c) for c in choices)


def _choice(block: Block, cluster: Cluster, name: str, asked: str, min_bytes: int, degrees: Degrees) -> Choice:
    uncoded = tasks_of(block, name, None, degrees)
    sent = math.fsum(t.bytes for t in uncoded if t.is_collective)
    largest = max((t.bytes for t in uncoded if t.is_collective), default=0.0)
    off = {"off": math.fsum(seconds(t, cluster) for t in uncoded)}
    choice = lambda codec, times, why: Choice(name, codec, sent, times, why)  # noqa: E731
    if not sent:
        return choice(None, off, "nothing is sent")
    if asked == "off":
        return choice(None, off, "as configured")
    if name != "gradients" and block.bytes_per_value != 2:
        return choice(None, off, "not bfloat16")
    if largest < min_bytes:
        return choice(None, off, f"collectives send at most {largest:.0f} bytes, less than codec.min_bytes={min_bytes}")
    if asked != "auto":
        return choice(asked, off, "as configured")
    if name in ROW_CLASSES and block.d_model % coder.BLOCK:
        return choice(None, off, f"rows of {block.d_model} values are not whole blocks of {coder.BLOCK}: few would fit")
    times = off | {codec: coded_seconds(block, cluster, name, codec, degrees)
                   for codec in TRIED if codec in cluster.codecs}
    best = min(times, key=lambda codec: times[codec])
    if len(times) == 1:
        return choice(None, times, f"cluster {cluster.name!r} has no rates in codecs.{' or codecs.'.join(TRIED)}")
    return choice(None if best == "off" else best, times, "fastest" if best != "off" else "coding takes longer")


def coded_seconds(block: Block, cluster: Cluster, name: str, codec: str, degrees: Degrees) -> float:
    return math.fsum(seconds(t, cluster) for t in tasks_of(block, name, codec, degrees))


def tasks_of(block: Block, name: str, codec: str | None, degrees: Degrees) -> list[Task]:
    """Tasks of one layer that move a class of tensors, coded or not."""
    coded = replace(block, codec=() if codec is None else ((name, codec),))
    graph = task_graph(coded, degrees, (), 1)
    return [t for t in (*graph.forward.tasks, *graph.tail.tasks) if t.verb in VERBS[name] and t.layer == 0]
