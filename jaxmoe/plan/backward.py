"""Tasks of a backward segment: what is recomputed, what is pulled, and the reductions of parameters' gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

from ..codec import wire_bytes
from .block import Block, Piece, pieces
from .forward import forward_pass
from .tasks import INTEGERS, Part, Pass, Task, family


@dataclass(frozen=True)
class Pull:
    """A backward task of a verb. wants: families whose cotangents it makes ("*": all but integers and parameters).
    needs: families whose values it needs. scale: its work over the forward task's. kind: if other than forward."""

    suffix: str
    direction: Literal["grad", "input_grad", "weight_grad"]
    wants: tuple[str, ...]
    needs: tuple[str, ...] = ()
    scale: float = 1.0
    kind: str | None = None


# "*" stands for all values that are not parameters, "params" for those that are.
PULLS: dict[str, tuple[Pull, ...]] = {
    "attn_in": (Pull("dx", "input_grad", ("*",), ("*", "params")),
                Pull("dw", "weight_grad", ("params",), ("*", "params"))),
    "attend": (Pull("grad", "grad", ("*",), ("*",), 2.5),),
    "attn_out": (Pull("dx", "input_grad", ("*",), ("*", "params")),
                 Pull("dw", "weight_grad", ("params",), ("*", "params"))),
    "model_gather": (Pull("grad", "grad", ("*",), kind="reduce_scatter"),),
    "model_scatter": (Pull("grad", "grad", ("*",), kind="all_gather"),),
    "route": (Pull("grad", "grad", ("*", "params"), ("*", "params", "choice"), 2.0),),
    "pack": (Pull("grad", "grad", ("*",), ("choice",)),),
    **{verb: (Pull("grad", "grad", ("*",)),)
       for name in ("dispatch", "combine") for verb in (name, f"{name}_within", f"encode_{name}", f"decode_{name}")},
    "expert_gather": (Pull("grad", "grad", ("*",), kind="reduce_scatter"),),
    "experts_up": (Pull("dx", "input_grad", ("*",), ("params", "sizes")),
                   Pull("dw", "weight_grad", ("params",), ("*", "params", "sizes"))),
    "experts_down": (Pull("dx", "input_grad", ("*",), ("*", "params", "sizes")),
                     Pull("dw", "weight_grad", ("params",), ("*", "params", "sizes"))),
    "expert_reduce": (Pull("grad", "grad", ("*",), kind="all_gather"),),
    **{verb: (Pull("grad", "grad", ("*",), kind="reduce_scatter"),) for verb in ("token_gather", "combine_gather")},
    **{verb: (Pull("grad", "grad", ("*",)),) for verb in ("combine_split", "combine_join")},
    "unpack": (Pull("grad", "grad", ("*", "params"), ("back", "weights", "choice", "sizes", "n", "params"), 1.0),),
    "shared_up": (Pull("dx", "input_grad", ("*",), ("*", "params")),
                  Pull("dw", "weight_grad", ("params",), ("*", "params"))),
    "shared_down": (Pull("dx", "input_grad", ("*",), ("*", "params")),
                    Pull("dw", "weight_grad", ("params",), ("*", "params"))),
    "tally": (Pull("grad", "grad", ("*",), ("*", "choice")),),
    "statistics": (Pull("grad", "grad", ("*",), kind="memory"),),
    "losses": (Pull("grad", "grad", ("*",), ("*",)),),
}


@lru_cache(maxsize=256)
def backward_pass(block: Block, moe: int, dense: int, saved: tuple[str, ...], slices: int) -> Pass:
    """Recomputation of what pulls need where it is not saved, pulls in reverse order, and reductions."""
    above = reductions(block, slices).tasks if block.layers > block.segment else ()
    return Pass((*own_tasks(block, moe, dense, saved), *above))


@lru_cache(maxsize=256)
def own_tasks(block: Block, moe: int, dense: int, saved: tuple[str, ...]) -> tuple[Task, ...]:
    """The backward pass without reductions, which are of the segment above."""
    forward = forward_pass(block, moe, dense)
    params, memo = frozenset(p.name for p in block.params), forward.wiring.memo
    key = own_tasks, params, saved
    if key not in memo:
        memo[key] = _drawn(forward.tasks, params, saved)
    return tuple([task.sized(forward.by_name[task.of], scale) for task, scale in memo[key]])


def _drawn(forward: Sequence[Task], params: frozenset[str], saved: tuple[str, ...]) -> list[tuple[Task, float]]:
    """Backward tasks, and the flops of each over those of the task that it pulls or repeats."""
    is_param = lambda v: v.partition("@")[0] in params  # noqa: E731
    select = lambda reads, what: tuple(  # noqa: E731
        v for v in reads if _matches(v, is_param(v), what))
    pulls, wanted = [], set()
    for task in reversed(forward):
        for pull in PULLS.get(task.verb, ()):
            needs, wants = select(task.reads, pull.needs), select(task.reads, pull.wants)
            if not wants:
                continue
            wanted |= set(needs)
            cotangents = tuple(f"d:{v}" for v in task.writes if family(v) not in INTEGERS)
            pulls.append((dataclasses.replace(
                task, name=f"{task.name}:{pull.suffix}", reads=(*cotangents, *needs),
                writes=(*(f"d:{v}" for v in wants), *_counted_back(task)), kind=pull.kind or _turned(task.kind),
                streams=("compute",) if pull.kind == "memory" else task.streams, direction=pull.direction,
                of=task.name), pull.scale))
    again = _recomputed(forward, wanted, lambda v: family(v) in saved and not is_param(v))
    return [*((task, 1.0) for task in again), *pulls]


def _turned(kind: str) -> str:
    """What was encoded is decoded on the way back, and the other way round."""
    verb, colon, codec = kind.partition(":")
    return {"encode": "decode", "decode": "encode"}.get(verb, verb) + colon + codec


def _counted_back(task: Task) -> tuple[str, ...]:
    """Counters of an exchange's way back, which ends where the forward one began."""
    verb, _, rest = task.name.partition("_")
    return (f"counted.{rest}:back",) if verb == "encode" else ()


def _matches(value: str, param: bool, what: tuple[str, ...]) -> bool:
    if param:
        return "params" in what
    fam = family(value)
    return fam in what or ("*" in what and fam not in INTEGERS)


def _recomputed(forward: Sequence[Task], wanted: set[str], is_kept) -> list[Task]:
    """Forward tasks to run again so that all wanted values are there."""
    wanted, chosen = set(wanted), []
    for task in reversed(forward):
        if any(v in wanted and not is_kept(v) for v in task.writes):
            chosen.append(dataclasses.replace(task, name=f"{task.name}:again", direction="recompute", of=task.name,
                                              writes=tuple(v for v in task.writes if family(v) == "counted" or
                                                           (v in wanted and not is_kept(v)))))
            wanted |= set(task.reads)
    return chosen[::-1]


@lru_cache(maxsize=256)
def reductions(block: Block, slices: int) -> Pass:
    """Reductions of the gradients of the segment above, which are pending when this one starts."""
    tasks = []
    for layer in range(block.segment):
        for s, some in enumerate(pieces(block, slices)):
            axes = tuple(dict.fromkeys(a for p in some for a in (*p.param.gather, *p.param.reduce)))
            tasks.append(_reduction(block, f".{s}@{layer}", some, axes, layer, s))
    return Pass(tuple(tasks))


def _reduction(block: Block, at: str, pieces: list[Piece], axes: tuple[str, ...], layer: int, s: int) -> Task:
    """Pieces of gathered parameters are scattered over the axes that gather them, then all are summed over the rest;
    coded, first over the axes within nodes, as they are."""
    values = _values_by_axes(block, pieces)
    codec = block.codec_of("gradients", sum(_values(p) for p in pieces) / block.size(axes), "float32")
    parts, encoded, decoded = [], 0.0, 0.0
    for (verb, over), count in values.items():
        phases = 1 if verb == "reduce_scatter" else 2
        if codec is None:
            parts.append(_part(block, verb, over, phases * count * 4))
            continue
        plain, coded = block.stages(over)
        n = block.size(coded)
        if plain:
            parts.append(_part(block, verb, plain, phases * count * 4))
            count /= block.size(plain)
        wire = n * wire_bytes((ceil(count / n),), "float32", codec)
        parts.append(_part(block, verb, coded, phases * wire))
        encoded, decoded = encoded + count * 4 * (1 if phases == 1 else 1 + 1 / n), decoded + count * 4 * phases
    kind = "all_reduce" if any(p.kind == "all_reduce" for p in parts) else "reduce_scatter"
    writes = [f"g:{p.param.name}.{p.lo}.{p.hi}@{layer}" for p in pieces]
    if codec is not None:
        kind, writes = f"{kind}:{codec}", [*writes, f"counted.gradients{at}"]
    reads = tuple(dict.fromkeys(f"pending:{p.param.name}@{layer}" for p in pieces))
    return Task(f"grad_reduce{at}", "grad_reduce", block.streams(axes), reads, tuple(writes), kind, 0.0,
                sum(p.bytes for p in parts), encoded, decoded, layer, s, parts=tuple(parts))


def _part(block: Block, verb: str, axes: tuple[str, ...], size: float) -> Part:
    """size: bytes of what a device has for the group, itself included."""
    n = block.size(axes)
    return Part(verb, block.streams(axes), size * (n - 1) / n, block.between(verb, axes))


def _values(piece: Piece) -> float:
    return (piece.hi - piece.lo) * piece.param.size / (piece.param.shape[0] if piece.param.shape else 1)


def _values_by_axes(block: Block, pieces: list[Piece]) -> dict[tuple[str, tuple[str, ...]], float]:
    """(Kind of collective, axes of more than one device) -> values that go in."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for piece in pieces:
        param, values = piece.param, _values(piece)
        for verb, over in (("reduce_scatter", param.gather), ("all_reduce", param.reduce)):
            n = block.size(over)
            if n > 1:
                found[verb, over] = found.get((verb, over), 0.0) + values
                values /= n   # what is left of a gathered parameter
    return found
