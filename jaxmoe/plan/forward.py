"""Tasks of a forward segment at given degrees."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from math import ceil

from ..codec import wire_bytes
from .block import CODED_GROUPS, Block
from .tasks import Part, Pass, Task


def cover(part: int, parts: int, others: int) -> range:
    """Which of `others` equal pieces overlap piece `part` of `parts`."""
    return range(part * others // parts, max(part * others // parts + 1, (part + 1) * others // parts))


@lru_cache(maxsize=256)
def forward_pass(block: Block, moe: int, dense: int) -> Pass:
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
        between = 1.0 if axes is None else self.b.between(kind, axes)
        self.tasks.append(Task(name, verb, streams, tuple(r + at for r in reads), tuple(w + at for w in writes), kind,
                               float(flops), float(count * self.b.bytes_per_value), layer=self.layer,
                               chunk=index[-1] if index else 0, between=between, **more))

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
            parts, raw = self._coded_gather(stored, part, codec), part * self.b.bytes_per_value
            self.add("param_gather", (group,), reads, [*names, f"counted.parameters.{group}"], axes,
                     f"all_gather:{codec}", count=sum(p.bytes for p in parts) / self.b.bytes_per_value, encoded=raw,
                     decoded=raw * self.b.size(self.b.stages(stored)[1]), parts=parts if len(parts) > 1 else ())

    def _coded_gather(self, axes: tuple[str, ...], part: float, codec: str) -> tuple[Part, ...]:
        """Of so many values of each device: coded between nodes, and what came of it, as it is, within."""
        b = self.b
        plain, coded = b.stages(axes)
        n = b.size(coded)
        between = Part("all_gather", b.streams(coded), (n - 1) * wire_bytes((ceil(part),), "bfloat16", codec))
        within = (b.size(plain) - 1) * n * part * b.bytes_per_value
        return (between, Part("all_gather", b.streams(plain), within)) if plain else (between,)

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
        gated, packed = h, f"n.{j}"
        made = [f"{f}.{j}" for f in ("n", "weights", "scores", "logits", "choice")]
        if b.sharers > 1:
            gated, packed = [f"tokens.{j}"], f"n_all.{j}"
            made = [*made[0 if b.shared_experts else 1:], packed]
            self.add("token_gather", (j,), h, gated, b.role("model"), "all_gather",
                     count=tokens * b.d_model * (b.sharers - 1))
        self.add("route", (j,), [*gated, *self._names("router")], made, kind="matmul",
                 flops=2 * tokens * b.sharers * b.d_model * b.num_experts)
        chunks = range(self.chunks)
        into = [f"slots.{j}.{i}" for i in chunks]
        self.add("pack", (j,), [packed, f"choice.{j}"], into, count=2 * self._slots() * b.d_model * self.chunks)
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
        return self.b.sent_rows / self.parts / self.chunks

    def _experts(self, j: int, i: int, sizes: list[str]) -> None:
        b, at = self.b, f".{j}.{i}"
        expert, shard = b.exchanges
        p, q, rows = b.size(expert), b.size(shard), self._slots()
        value, sent = f"slots{at}", rows * b.copies * b.d_model
        if p > 1:
            self._exchange("dispatch", (j, i), value, f"recv{at}" if q > 1 else f"rows{at}", sent)
            value = f"recv{at}"
        if q > 1:
            self.add("expert_gather", (j, i), [value], [f"rows{at}"], shard, "all_gather", count=sent * (q - 1))
        into = f"rows{at}" if p * q > 1 else value
        matrices = 2 if b.gated else 1
        flops = 2 * rows * b.d_model * b.d_ff
        weights = [n for n in self._names("experts") if n != "w_down_EFD"]
        self.add("experts_up", (j, i), [into, *weights, *sizes], [f"hidden{at}"], kind="matmul", flops=flops * matrices)
        out = f"out{at}" if p * b.sharers > 1 else f"back{at}"
        self.add("experts_down", (j, i), [f"hidden{at}", "w_down_EFD", *sizes], [f"part{at}" if q > 1 else out],
                 kind="matmul", flops=flops)
        if q > 1:
            self.add("expert_reduce", (j, i), [f"part{at}"], [out], shard, "reduce_scatter", count=sent * (q - 1))
        if b.sharers > 1:
            self._combine_in_steps(j, i, rows * b.d_model)
        elif p > 1:
            self._exchange("combine", (j, i), f"out{at}", f"back{at}", sent)

    def _combine_in_steps(self, j: int, i: int, own: float) -> None:
        """A combine whose steps are gathered one behind (Parm's SAA). own: values of this device's slots.

        A step takes as long as an All-to-All of its bytes, messages to devices with the same experts start together,
        and the step to these of this device's own place needs only the links between them (ours).
        """
        b, at = self.b, f".{j}.{i}"
        (axes, mates), model = b.turns, b.role("model")
        steps, copies = b.size(axes), b.copies
        # From nodes to nodes all messages of a step cross; within one, those to mates in others do
        over = (*axes, *mates) if copies > 1 and b.streams(axes) == ("intra",) else axes

        def gather(index: tuple, read: str, write: str, values: float) -> None:
            self.add("combine_gather", index, [read], [write], model, "all_gather", count=values * (b.sharers - 1))

        if steps * copies == 1:
            gather((j, i), f"out{at}", f"back{at}", own)
            return
        sent, came, met = ([f"{family}{at}.{s}" for s in range(steps)] for family in ("sent", "came", "met"))
        self.add("combine_split", (j, i), [f"out{at}"], sent, count=2 * own * copies)
        if copies == 1:
            came[0] = sent[0]
        for s in range(steps):
            part = own / steps
            if s:
                self.add("combine", (j, i, s), [sent[s]], [came[s]], over, "all_to_all", count=part * copies)
            elif copies > 1:
                self.add("combine", (j, i, s), [sent[s]], [came[s]], mates, "all_to_all", count=part * (copies - 1))
            gather((j, i, s), came[s], met[s], part)
        self.add("combine_join", (j, i), met, [f"back{at}"], count=2 * own * b.sharers)

    def _exchange(self, verb: str, index: tuple, read: str, write: str, sent: float) -> None:
        """All-to-Alls of `sent` values of a device, one after the other."""
        *first, last = self.b.steps(verb)
        for step, axes in first:
            near = ".".join(("near", step, *map(str, index)))
            self._all_to_all(step, index, read, near, axes, sent)
            read = near
        self._all_to_all(last[0], index, read, write, last[1], sent)

    def _all_to_all(self, verb: str, index: tuple, read: str, write: str, axes: tuple[str, ...], sent: float) -> None:
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
