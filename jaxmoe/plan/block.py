"""A stack of transformer blocks as planning sees it: shapes, roles, parameters, and what they are cut along."""

from __future__ import annotations

import dataclasses
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod
from typing import Any, Literal, get_args

from ..codec import wire_bytes
from .tasks import STREAMS, Degrees

Pairs = tuple[tuple[str, Any], ...]
Layout = Literal["slots", "ragged"]
Chunk = Literal["slots", "batch", "sequence"]
Split = Literal["tokens", "slots"]
LAYOUTS, CHUNKS, SPLITS = get_args(Layout), get_args(Chunk), get_args(Split)

# Parameters whose gathers can be coded: they are used in the compute type only.
CODED_GROUPS = ("attention", "experts", "shared")
# What is kept by default: with these, the backward pass repeats no matrix product but attention's scores.
SAVED = ("x", "q", "k", "v", "o", "h", "weights", "scores", "logits", "choice", "sizes", "rows", "hidden", "back",
         "shared_hidden", "n", "sums")
# What is kept less, step by step, where memory does not hold it all (ours): cheap to repeat first.
DROPPED = (("o", "n"), ("q", "k", "v", "h"), ("hidden", "shared_hidden"), ("rows",),
           tuple(f for f in SAVED if f != "x"))


def less_saved(saved: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Sets of families to save, each a part of the one before; the last one holds no more than "x"."""
    found, gone = [], set()
    for families in DROPPED:
        gone |= set(families)
        kept = tuple(f for f in saved if f not in gone)
        if kept != (found[-1] if found else saved):
            found.append(kept)
    return found


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
    "slots"), or rows that it sends to each device with experts ("ragged"). group_rows: slots of one expert that the
    devices of a `model` group fill together, if no token counts twice. attention: False = MoE layers only, without
    residual sums.
    groups: capacity groups of a device, 0 = one a sequence. by_token: no token is dropped, and none's experts depend on
    another token. fused: one All-to-All to all devices with a part of an expert, each of which gets every row of it,
    and one back whose partial outputs are summed where they arrive, instead of collectives over `expert` and over
    `expert_shard` (layout "slots"). split: what a `model` group divides among its devices. "tokens": each gates its
    own, and holds as many slots as these may fill. "slots": each gates all of the group's tokens and sends a part of
    every expert's slots; what comes back is gathered, step by step behind the All-to-All, never coded (layout "slots").
    hierarchical: All-to-Alls over both links come in two, see `steps`; only the one between nodes is coded.
    layers: of the stack; segment: layers that are planned together, and repeated.
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
    layout: Layout = "slots"
    chunk: Chunk = "slots"
    groups: int = 0
    by_token: bool = True
    fused: bool = False
    split: Split = "tokens"
    group_rows: int = 0
    hierarchical: bool = False
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
        for name, known in (("layout", LAYOUTS), ("chunk", CHUNKS), ("split", SPLITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} of a block must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for axis, link in self.links:
            if link not in STREAMS[1:]:
                raise ValueError(f"links.{axis} must be one of {', '.join(STREAMS[1:])}, got {link!r}")
        if self.fused and self.layout != "slots":
            raise ValueError(f'a fused All-to-All needs moe.dispatch.kind="slots", got "{self.layout}"')
        if self.split == "slots" and self.layout != "slots":
            raise ValueError(f'slots that a model group shares need moe.dispatch.kind="slots", got "{self.layout}"')
        if self.hierarchical and not self.spans_links:
            raise ValueError("schedule.hierarchical needs experts over axes of both links, got "
                             f"{', '.join(self.exchanges[0]) or 'none'}")
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

    def between(self, kind: str, axes: tuple[str, ...]) -> float:
        """Share of a device's bytes that goes between nodes, of a collective over both links.

        A flat All-to-All's go to all other devices alike. Others run in rings, one for each of the group's devices in a
        node, and each ring enters a node once (derived from how NCCL builds rings where every GPU has a network card).
        """
        if self.streams(axes) != STREAMS[1:]:
            return 1.0
        n, mates = self.size(axes), self.size(tuple(a for a in axes if dict(self.links).get(a) == "intra"))
        return (n - mates) / (n - 1) if kind.startswith("all_to_all") else 1 / mates

    def stages(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes over which a coded gather or reduction sends values as they are, and those over which it codes them:
        those between nodes, or all if there are none."""
        used = tuple(a for a in axes if self.size((a,)) > 1)
        between = tuple(a for a in used if self.streams((a,)) == ("inter",))
        return (tuple(a for a in used if a not in between), between) if between else ((), used)

    @property
    def exchanges(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes of the All-to-Alls, and of what gathers rows and sums outputs."""
        expert, shard = self.role("expert"), self.role("expert_shard")
        return ((*expert, *shard), ()) if self.fused else (expert, shard)

    @property
    def spans_links(self) -> bool:
        """Whether All-to-Alls go over both links."""
        return self.streams(self.exchanges[0]) == STREAMS[1:]

    def steps(self, verb: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The All-to-Alls of "dispatch" or "combine" in their order, and the axes of each.

        Hierarchical: rows for all GPUs of one place in their nodes go to the one of this place in the sender's node,
        and from there to their nodes; and back the same way. Between nodes go as many bytes, in messages as many times
        larger as a node has GPUs.
        """
        axes, _ = self.exchanges
        if not self.hierarchical:
            return ((verb, axes),)
        within = tuple(a for a in axes if dict(self.links).get(a) == "intra")
        found = (f"{verb}_within", within), (verb, tuple(a for a in axes if a not in within))
        return found if verb == "dispatch" else found[::-1]

    @property
    def copies(self) -> int:
        """Devices that an All-to-All sends the same rows to."""
        return self.size(self.role("expert_shard")) if self.fused else 1

    @property
    def sharers(self) -> int:
        """Devices of a `model` group that divide every expert's slots among them."""
        return self.size(self.role("model")) if self.split == "slots" else 1

    @property
    def sent_rows(self) -> int:
        """Rows of all experts that a device sends, before copies."""
        rows = self.rows if self.sharers == 1 else ceil(self.group_rows / self.sharers)
        return rows * (self.num_experts if self.layout == "slots" else self.size(self.role("expert")))

    @property
    def turns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Axes of an All-to-All's steps, and of devices that are served in one step, as they hold the same experts."""
        return self.role("expert"), self.role("expert_shard") if self.fused else ()

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

    def check_degrees(self, d: Degrees) -> None:
        """Raise ValueError unless the block can be cut at these degrees."""
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
