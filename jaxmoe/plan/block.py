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

import dataclasses
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod
from typing import Any, Literal

from ..codec import wire_bytes
from .tasks import STREAMS, Degrees, Pass, Task, TaskGraph

Pairs = tuple[tuple[str, Any], ...]

# Families of values that have no cotangent: they hold integers, or counters.
INTEGERS = frozenset({"choice", "sizes", "counted"})
# Tensor classes whose collectives can be coded, and the parameters that are: they are used in the compute type only.
CLASSES = ("dispatch", "combine", "parameters", "gradients")
CODED_GROUPS = ("attention", "experts", "shared")
# What is kept by default: with these, the backward pass repeats no matrix product but attention's scores.
SAVED = ("x", "q", "k", "v", "o", "h", "weights", "scores", "logits", "choice", "sizes", "rows", "hidden", "back",
         "shared_hidden", "n", "sums")


@dataclass(frozen=True)
class Param:
    """A parameter of one layer. shape: on a device, when whole. gather: axes that only store it, over its dim
    `gather_dim`. reduce: axes that it is replicated over and that its gradient is summed over."""

    name: str
    group: str
    shape: tuple[int, ...]
    gather: tuple[str, ...] = ()
    gather_dim: int = 0
    reduce: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """Rows lo to hi of a parameter's gradient (its first dim)."""

    param: Param
    lo: int
    hi: int


@dataclass(frozen=True)
class Block:
    """A stack of equal blocks, as one device sees it.

    batch, seq: a device's sequences, and positions of each. rows: slots of one expert that a device fills (layout
    "slots"), or rows that it sends to each device with experts ("ragged"). attention: False = MoE layers only, without
    residual sums.
    groups: capacity groups of a device, 0 = one a sequence. by_token: no token is dropped, and none's experts depend on
    another token. fused: one All-to-All to all devices with a part of an expert, each of which gets every row of it,
    and one back whose partial outputs are summed where they arrive, instead of collectives over `expert` and over
    `expert_shard` (layout "slots"). layers: of the stack; segment: layers that are planned together, and repeated.
    axes: mesh axis -> size. links: mesh axis -> "intra" or "inter". roles: role -> mesh axes, as in the config. params:
    of one layer.
    """

    batch: int
    seq: int
    d_model: int
    d_ff: int
    num_experts: int
    k: int
    rows: int
    layout: Literal["slots", "ragged"] = "slots"
    chunk: Literal["slots", "batch", "sequence"] = "slots"
    groups: int = 0
    by_token: bool = True
    fused: bool = False
    gated: bool = True
    shared_experts: int = 0
    attention: bool = False
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    layers: int = 1
    segment: int = 1
    bytes_per_value: int = 4
    axes: Pairs = ()
    links: Pairs = ()
    roles: Pairs = ()
    codec: Pairs = ()
    params: tuple[Param, ...] = ()

    def __post_init__(self):
        if self.layers % self.segment:
            raise ValueError(f"model.layers must be a multiple of schedule.segment={self.segment}, got {self.layers}")
        for axis, link in self.links:
            if link not in STREAMS[1:]:
                raise ValueError(f"links.{axis} must be one of {', '.join(STREAMS[1:])}, got {link!r}")
        if self.fused and self.layout != "slots":
            raise ValueError(f'a fused All-to-All needs moe.dispatch.kind="slots", got "{self.layout}"')
        if self.chunk == "sequence" and not self.by_token:
            raise ValueError("chunks along the sequence must drop nothing, as first choices of later tokens come "
                             "before second ones of earlier tokens, and tokens must choose experts: use "
                             'moe.dispatch.kind="ragged" or a larger moe.dispatch.capacity_factor, and a router other '
                             'than "expert_choice"')

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> Block:
        """From what JSON holds."""
        pairs = lambda value: tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in value)  # noqa: E731
        lists = lambda p: {k: tuple(v) if isinstance(v, list) else v for k, v in p.items()}  # noqa: E731
        params = tuple(Param(**dict[str, Any](lists(p))) for p in tree["params"])
        named = {k: pairs(tree[k]) for k in ("axes", "links", "roles", "codec")}
        return Block(**{**tree, **named, "params": params})

    def codec_of(self, tensors: str, part: float, dtype: str = "bfloat16") -> str | None:
        """Format of a class of tensors for parts of so many values: "raw" where it would not make them smaller."""
        codec = dict(self.codec).get(tensors)
        return "raw" if codec and wire_bytes((ceil(part),), dtype, codec) >= wire_bytes((ceil(part),), dtype, "raw") \
            else codec

    def role(self, name: str) -> tuple[str, ...]:
        return dict(self.roles).get(name, ())

    def size(self, axes: tuple[str, ...]) -> int:
        return prod(dict(self.axes)[a] for a in axes)

    def streams(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Links that a collective over these axes holds; "inter" where nothing is said."""
        used = {dict(self.links).get(a, "inter") for a in axes if dict(self.axes)[a] > 1}
        return tuple(s for s in STREAMS[1:] if s in used) or ("inter",)

    @property
    def exchanges(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes of the All-to-Alls, and of what gathers rows and sums outputs."""
        expert, shard = self.role("expert"), self.role("expert_shard")
        return ((*expert, *shard), ()) if self.fused else (expert, shard)

    @property
    def copies(self) -> int:
        """Devices that an All-to-All sends the same rows to."""
        return self.size(self.role("expert_shard")) if self.fused else 1

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def token_dim(self) -> int:
        """Dim of activations [B, S, D] that token parts are cut along."""
        return 1 if self.chunk == "sequence" else 0

    def token_parts(self, degrees: Degrees) -> int:
        """Parts that MoE work, and the residual stream between blocks, come in; the same forward and backward."""
        return 1 if self.chunk == "slots" else degrees.moe_forward

    def graph(self, degrees: Degrees, saved: tuple[str, ...], slices: int) -> TaskGraph:
        """saved: names of families to keep for the backward pass."""
        self._check(degrees)
        there, back = (degrees.moe_forward, degrees.dense_forward), (degrees.moe_backward, degrees.dense_backward)
        return TaskGraph(_forward(self, *there), _backward(self, *back, tuple(saved), slices), _forward(self, *back),
                         _tail(self, slices))

    def _check(self, d: Degrees) -> None:
        if self.chunk == "slots":
            for name, degree in (("dense_forward", d.dense_forward), ("dense_backward", d.dense_backward)):
                if degree != 1:
                    raise ValueError(f"schedule.degrees.{name} must be 1 for chunks along slots, got {degree}")
            if self.layout == "ragged" and d.moe_forward != d.moe_backward:
                raise ValueError("schedule.degrees: moe_forward and moe_backward must be equal for ragged dispatch, "
                                 f"got {d.moe_forward} and {d.moe_backward}")
            return
        size, dim = (self.groups or self.batch, "capacity groups") if self.chunk == "batch" else (self.seq, "positions")
        if (d.moe_forward, d.dense_forward) != (d.moe_backward, d.dense_backward):
            raise ValueError(f"schedule.degrees: forward and backward must be equal for chunks along the {self.chunk}, "
                             f"got {d}")
        for name, degree in dataclasses.asdict(d).items():
            if size % degree:
                raise ValueError(f"schedule.degrees.{name} must divide the device's {size} {dim}, got {degree}")
        if max(d.moe_forward, d.dense_forward) % min(d.moe_forward, d.dense_forward):
            raise ValueError(f"schedule.degrees: moe and dense degrees must divide one another, got {d}")


def family(value: str) -> str:
    """"rows.0.1@2" -> "rows"; "d:x.0@0" -> "x"."""
    return value.removeprefix("d:").partition("@")[0].partition(".")[0]


def cover(part: int, parts: int, others: int) -> range:
    """Which of `others` equal pieces overlap piece `part` of `parts`."""
    return range(part * others // parts, max(part * others // parts + 1, (part + 1) * others // parts))


@lru_cache(maxsize=256)
def _forward(block: Block, moe: int, dense: int) -> Pass:
    return Pass(tuple(_Builder(block, moe, dense).segment()))


class _Builder:
    """Tasks of a forward segment at given degrees."""

    def __init__(self, block: Block, moe: int, dense: int):
        self.b, self.dense = block, dense
        slots = block.chunk == "slots"
        self.parts, self.chunks = (1, moe) if slots else (moe, 1)
        self.tasks: list[Task] = []

    def segment(self) -> list[Task]:
        for layer in range(self.b.segment):
            self.layer = layer
            self._params()
            if self.b.attention:
                self._attention()
            for part in range(self.parts):
                self._moe(part)
            self._statistics()
        return self.tasks

    def add(self, verb, index, reads, writes, axes=None, kind="memory", flops=0.0, count=0.0, **more):
        """index: part and chunk. axes: of a collective. count: values sent, or moved through memory."""
        at = f"@{self.layer}"
        name = ".".join((verb, *map(str, index))) + at
        streams = ("compute",) if axes is None else self.b.streams(axes)
        self.tasks.append(Task(name, verb, streams, tuple(r + at for r in reads), tuple(w + at for w in writes), kind,
                               float(flops), float(count * self.b.bytes_per_value), layer=self.layer,
                               chunk=index[-1] if index else 0, **more))

    def _params(self) -> None:
        groups = dict.fromkeys(p.group for p in self.b.params)
        for group in groups:
            params = [p for p in self.b.params if p.group == group]
            stored = tuple(dict.fromkeys(a for p in params for a in p.gather))
            n = self.b.size(stored)
            sent = sum(p.size for p in params if p.gather) * (n - 1) / n
            names = [p.name for p in params]
            reads, axes = [f"p:{x}" for x in names], stored if n > 1 else None
            part = sent / max(n - 1, 1)
            codec = self.b.codec_of("parameters", part) if group in CODED_GROUPS else None
            if codec is None or n == 1:
                self.add("param_gather", (group,), reads, names, axes, "all_gather" if n > 1 else "memory", count=sent)
                continue
            raw = part * self.b.bytes_per_value
            wire = (n - 1) * wire_bytes((ceil(part),), "bfloat16", codec)
            self.add("param_gather", (group,), reads, [*names, f"counted.parameters.{group}"], axes,
                     f"all_gather:{codec}", count=wire / self.b.bytes_per_value, encoded=raw, decoded=raw * n)

    def _names(self, *groups: str) -> list[str]:
        return [p.name for p in self.b.params if p.group in groups]

    def _attention(self) -> None:
        b, p = self.b, self.dense
        m = b.size(b.role("model"))
        tokens = b.tokens * m / p
        width, kv = b.heads * b.head_dim / m, b.kv_heads * b.head_dim / m
        params = self._names("attention")
        into = [n for n in params if n != "w_o"]
        for i in range(p):
            x = [f"x.{j}" for j in cover(i, p, self.parts)]
            seen = range(i + 1) if b.chunk == "sequence" else (i,)
            if m > 1:
                self.add("model_gather", (i,), x, [f"xg.{i}"], b.role("model"), "all_gather",
                         count=b.tokens / p * b.d_model * (m - 1))
            self.add("attn_in", (i,), [f"xg.{i}"] if m > 1 else x, [f"q.{i}", f"k.{i}", f"v.{i}"], kind="matmul",
                     flops=2 * tokens * b.d_model * (width + 2 * kv))
            self._reads_more(into)
            keys = b.seq * m * (len(seen) - 0.5) / (p if b.chunk == "sequence" else 1)
            self.add("attend", (i,), [f"q.{i}", *(f"k.{j}" for j in seen), *(f"v.{j}" for j in seen)], [f"o.{i}"],
                     kind="matmul", flops=4 * tokens * keys * width)
            out = ([f"o.{i}", "w_o"], [f"u.{i}"]) if m > 1 else ([f"o.{i}", "w_o", *x], [f"h.{i}"])
            self.add("attn_out", (i,), *out, kind="matmul", flops=2 * tokens * b.d_model * width)
            if m > 1:
                self.add("model_scatter", (i,), [f"u.{i}", *x], [f"h.{i}"], b.role("model"), "reduce_scatter",
                         count=tokens * b.d_model * (m - 1) / m)

    def _reads_more(self, names: list[str]) -> None:
        last = self.tasks[-1]
        self.tasks[-1] = dataclasses.replace(last, reads=(*last.reads, *(f"{n}@{self.layer}" for n in names)))

    def _moe(self, j: int) -> None:
        b, tokens = self.b, self.b.tokens / self.parts
        h = self._hidden(j)
        self.add("route", (j,), [*h, *self._names("router")],
                 [f"{f}.{j}" for f in ("n", "weights", "scores", "logits", "choice")], kind="matmul",
                 flops=2 * tokens * b.d_model * b.num_experts)
        chunks = range(self.chunks)
        into = [f"slots.{j}.{i}" for i in chunks]
        self.add("pack", (j,), [f"n.{j}", f"choice.{j}"], into, count=2 * self._slots() * b.d_model * self.chunks)
        ragged = b.layout == "ragged"
        if ragged:
            axes = (*b.role("expert"), *b.role("expert_shard"))
            self.add("exchange_sizes", (j,), [f"choice.{j}"], [f"sizes.{j}"], axes if b.size(axes) > 1 else None,
                     "all_to_all" if b.size(axes) > 1 else "memory", count=b.num_experts)
        shared = self._shared(j, tokens) if b.shared_experts else []
        for i in chunks:
            self._experts(j, i, [f"sizes.{j}"] if ragged else [])
        back = [f"back.{j}.{i}" for i in chunks]
        extra = [f"sizes.{j}", f"n.{j}", *self._names("experts")] if ragged else []
        residual = h if b.attention else []
        self.add("unpack", (j,), [*back, f"weights.{j}", f"choice.{j}", *residual, *shared, *extra], [f"x.{j}"],
                 count=tokens * b.d_model * (b.k + 2))
        self.tasks[-1] = dataclasses.replace(self.tasks[-1], writes=(f"x.{j}@{self.layer + 1}",))

    def _hidden(self, j: int) -> list[str]:
        """What the MoE part reads: attention's results, or the input itself."""
        return [f"h.{i}" for i in cover(j, self.parts, self.dense)] if self.b.attention else [f"x.{j}"]

    def _slots(self) -> float:
        """Rows that a device sends in one chunk."""
        b = self.b
        all_rows = b.rows * (b.num_experts if b.layout == "slots" else b.size(b.role("expert")))
        return all_rows / self.parts / self.chunks

    def _experts(self, j: int, i: int, sizes: list[str]) -> None:
        b, at = self.b, f".{j}.{i}"
        expert, shard = b.exchanges
        p, q, rows = b.size(expert), b.size(shard), self._slots()
        value, sent = f"slots{at}", rows * b.copies * b.d_model
        if p > 1:
            self._exchange("dispatch", (j, i), value, f"recv{at}" if q > 1 else f"rows{at}", expert, sent)
            value = f"recv{at}"
        if q > 1:
            self.add("expert_gather", (j, i), [value], [f"rows{at}"], shard, "all_gather", count=sent * (q - 1))
        into = f"rows{at}" if p * q > 1 else value
        matrices = 2 if b.gated else 1
        flops = 2 * rows * b.d_model * b.d_ff
        weights = [n for n in self._names("experts") if n != "w_down_EFD"]
        self.add("experts_up", (j, i), [into, *weights, *sizes], [f"hidden{at}"], kind="matmul", flops=flops * matrices)
        out = [f"part{at}" if q > 1 else f"out{at}" if p > 1 else f"back{at}"]
        self.add("experts_down", (j, i), [f"hidden{at}", "w_down_EFD", *sizes], out, kind="matmul", flops=flops)
        if q > 1:
            self.add("expert_reduce", (j, i), [f"part{at}"], [f"out{at}" if p > 1 else f"back{at}"], shard,
                     "reduce_scatter", count=sent * (q - 1))
        if p > 1:
            self._exchange("combine", (j, i), f"out{at}", f"back{at}", expert, sent)

    def _exchange(self, verb: str, index: tuple, read: str, write: str, axes: tuple[str, ...], sent: float) -> None:
        """An All-to-All of `sent` values of a device; if it is coded, with tasks that code before and after it."""
        n = self.b.size(axes)
        codec = self.b.codec_of(verb, sent / n)
        if codec is None:
            self.add(verb, index, [read], [write], axes, "all_to_all", count=sent * (n - 1) / n)
            return
        stem = ".".join((verb, *map(str, index)))
        wire = (n - 1) * wire_bytes((ceil(sent / n),), "bfloat16", codec)
        self.add(f"encode_{verb}", index, [read], [f"coded.{stem}"], kind=f"encode:{codec}", count=sent)
        self.add(verb, index, [f"coded.{stem}"], [f"came.{stem}"], axes, "all_to_all",
                 count=wire / self.b.bytes_per_value)
        self.add(f"decode_{verb}", index, [f"came.{stem}"], [write, f"counted.{stem}"], kind=f"decode:{codec}",
                 count=sent)

    def _shared(self, j: int, tokens: float) -> list[str]:
        b, names = self.b, self._names("shared")
        flops = 2 * tokens * b.d_model * b.d_ff * b.shared_experts
        into = [n for n in names if "down" not in n]
        self.add("shared_up", (j,), [f"n.{j}", *into], [f"shared_hidden.{j}"], kind="matmul",
                 flops=flops * (2 if b.gated else 1))
        self.add("shared_down", (j,), [f"shared_hidden.{j}", *(n for n in names if "down" in n)], [f"shared.{j}"],
                 kind="matmul", flops=flops)
        return [f"shared.{j}"]

    def _statistics(self) -> None:
        b = self.b
        reads = [f"{f}.{j}" for j in range(self.parts) for f in ("weights", "scores", "logits", "choice")]
        axes = tuple(a for a, _ in b.axes)
        self.add("tally", (), reads, ["tally"], count=b.tokens * b.num_experts)
        self.add("statistics", (), ["tally"], ["sums"], axes if b.size(axes) > 1 else None,
                 "all_reduce" if b.size(axes) > 1 else "memory", count=4 * b.num_experts)
        self.add("losses", (), ["sums"], ["aux"], count=4 * b.num_experts)


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
    **{verb: (Pull("grad", "grad", ("*",)),) for verb in ("dispatch", "encode_dispatch", "decode_dispatch")},
    "expert_gather": (Pull("grad", "grad", ("*",), kind="reduce_scatter"),),
    "experts_up": (Pull("dx", "input_grad", ("*",), ("params", "sizes")),
                   Pull("dw", "weight_grad", ("params",), ("*", "params", "sizes"))),
    "experts_down": (Pull("dx", "input_grad", ("*",), ("*", "params", "sizes")),
                     Pull("dw", "weight_grad", ("params",), ("*", "params", "sizes"))),
    "expert_reduce": (Pull("grad", "grad", ("*",), kind="all_gather"),),
    **{verb: (Pull("grad", "grad", ("*",)),) for verb in ("combine", "encode_combine", "decode_combine")},
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
def _backward(block: Block, moe: int, dense: int, saved: tuple[str, ...], slices: int) -> Pass:
    """Recomputation of what pulls need where it is not saved, pulls in reverse order, and reductions."""
    forward = _forward(block, moe, dense).tasks
    params = {p.name for p in block.params}
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
            pulls.append(dataclasses.replace(
                task, name=f"{task.name}:{pull.suffix}", reads=(*cotangents, *needs),
                writes=(*(f"d:{v}" for v in wants), *_counted_back(task)), kind=pull.kind or _turned(task.kind),
                flops=task.flops * pull.scale,
                streams=("compute",) if pull.kind == "memory" else task.streams, direction=pull.direction,
                of=task.name))
    again = _recomputed(forward, wanted, lambda v: family(v) in saved and not is_param(v))
    reductions = _tail(block, slices).tasks if block.layers > block.segment else ()
    return Pass((*again, *pulls, *reductions))


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


def pieces(block: Block, slices: int) -> list[list[Piece]]:
    """Gradients to reduce, cut into `slices` lists of about equal size; stored parameters are not cut."""
    params = [p for p in block.params if block.size((*p.gather, *p.reduce)) > 1]
    total = sum(p.size for p in params)
    bounds = [total * s / slices for s in range(1, slices)]
    found: list[list[Piece]] = [[] for _ in range(slices)]
    start = 0.0
    for p in params:
        rows = p.shape[0] if p.shape else 1
        row_size = p.size / rows
        cuts = {0, rows}
        if not p.gather:
            cuts |= {round((b - start) / row_size) for b in bounds if start < b < start + p.size}
        for lo, hi in pairwise(sorted(cuts)):
            found[bisect(bounds, start + (lo + hi) / 2 * row_size)].append(Piece(p, lo, hi))
        start += p.size
    return [f for f in found if f]


@lru_cache(maxsize=256)
def _tail(block: Block, slices: int) -> Pass:
    """Reductions of the gradients of the segment above, which are pending when this one starts."""
    tasks = []
    for layer in range(block.segment):
        for s, parts in enumerate(pieces(block, slices)):
            axes = tuple(dict.fromkeys(a for p in parts for a in (*p.param.gather, *p.param.reduce)))
            kind = "reduce_scatter" if all(p.param.gather for p in parts) else "all_reduce"
            tasks.append(_reduction(block, f".{s}@{layer}", parts, axes, kind, layer, s))
    return Pass(tuple(tasks))


def _reduction(block: Block, at: str, parts: list[Piece], axes: tuple[str, ...], kind: str, layer: int, s: int) -> Task:
    n, phases = block.size(axes), 1 if kind == "reduce_scatter" else 2
    sizes = [(p.hi - p.lo) * p.param.size / (p.param.shape[0] if p.param.shape else 1) for p in parts]
    codec = block.codec_of("gradients", sum(sizes) / n, "float32")
    raw, encoded, decoded = sum(sizes) * 4, 0.0, 0.0
    sent = phases * raw * (n - 1) / n
    writes = [f"g:{p.param.name}.{p.lo}.{p.hi}@{layer}" for p in parts]
    if codec is not None:
        sent = phases * (n - 1) * wire_bytes((ceil(sum(sizes) / n),), "float32", codec)
        encoded, decoded = raw * (1 if phases == 1 else 1 + 1 / n), raw * phases
        kind, writes = f"{kind}:{codec}", [*writes, f"counted.gradients{at}"]
    reads = tuple(dict.fromkeys(f"pending:{p.param.name}@{layer}" for p in parts))
    return Task(f"grad_reduce{at}", "grad_reduce", block.streams(axes), reads, tuple(writes), kind, 0.0, sent,
                encoded, decoded, layer, s)
