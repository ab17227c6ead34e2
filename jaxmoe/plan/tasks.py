"""Tasks, the passes and graphs that they make up, and the ties that a plan adds to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Literal

STREAMS: tuple[str, ...] = ("compute", "intra", "inter")
# Families of values that have no cotangent: they hold integers, or counters.
INTEGERS = frozenset({"choice", "sizes", "counted"})

Direction = Literal["forward", "recompute", "grad", "input_grad", "weight_grad"]


@dataclass(frozen=True)
class Part:
    """One collective of a task: kind, bytes and between as of a task that is just this."""

    kind: str
    streams: tuple[str, ...]
    bytes: float
    between: float = 1.0


@dataclass(frozen=True)
class Task:
    """One verb on one chunk.

    name: unique in its graph. streams: queues that it occupies from start to end. reads, writes: names of values; a
    cotangent is named "d:" + its value, and is the sum of what all its writers write. kind: what its time depends on,
    "matmul" (flops), "memory" (bytes through memory), or a collective ("all_to_all", "all_gather", "reduce_scatter",
    "all_reduce"; bytes that one device sends), "encode:FORMAT" or "decode:FORMAT" (bytes uncoded). A collective that
    codes by itself is of kind "all_gather:FORMAT" and the like; encoded, decoded: bytes uncoded that it then codes.
    between: of a collective over both links, the share of its bytes that goes between nodes. of: in a backward pass,
    the forward task that it recomputes or pulls. parts: the collectives of a task that is several, one after the other;
    bytes is their sum.
    """

    name: str
    verb: str
    streams: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kind: str = "memory"
    flops: float = 0.0
    bytes: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0
    layer: int = 0
    chunk: int = 0
    direction: Direction = "forward"
    of: str = ""
    parts: tuple[Part, ...] = ()
    between: float = 1.0

    @property
    def is_collective(self) -> bool:
        return self.streams != ("compute",)

    def sized(self, other: Task, scale: float) -> Task:
        """The task with the size of another, and `scale` times its flops. (`dataclasses.replace`, five times as fast.)
        """
        found = object.__new__(Task)
        found.__dict__.update(self.__dict__, flops=other.flops * scale, bytes=other.bytes, encoded=other.encoded,
                              decoded=other.decoded, parts=other.parts, between=other.between)
        return found


def scope(task: Task, tail: bool = False) -> str:
    """The name under which a task is found in a compiled program: "/" and "@" would be cut or rewritten there.

    tail: it is one of the reductions behind the last segment, which are those of other segments otherwise.
    """
    return ("tail_" if tail else "") + "task_" + task.name.replace("@", "_L").replace(":", "__")


def codec_of(task: Task) -> str | None:
    """Format that the task codes or decodes, as its kind says."""
    return task.kind.partition(":")[2] or None


@dataclass(frozen=True)
class Span:
    """Collective `task` flies from the start of compute task `first` to the end of compute task `last`."""

    task: str
    first: str
    last: str


class Wiring:
    """A pass but for its sizes, in numbers: tasks in order, streams by their place in `STREAMS`.

    writers: value -> names of the tasks that write it. after: task -> tasks that must end before it starts. reads: the
    same in numbers. sorted: numbers, each behind those that it reads from. memo: what was found out about all passes
    that are wired so, such as orders that no size changes.
    """

    def __init__(self, tasks: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]]):
        """tasks: name, streams, reads and writes of each."""
        self.index = {name: i for i, (name, *_) in enumerate(tasks)}
        self.streams = [tuple(STREAMS.index(s) for s in streams) for _, streams, *_ in tasks]
        self.writers: dict[str, tuple[str, ...]] = {}
        for name, _, _, writes in tasks:
            for value in writes:
                self.writers[value] = (*self.writers.get(value, ()), name)
        self.after = {name: tuple(dict.fromkeys(w for v in reads for w in self.writers.get(v, ())))
                      for name, _, reads, _ in tasks}
        self.reads = [tuple(self.index[n] for n in earlier) for earlier in self.after.values()]
        self.memo: dict[Any, Any] = {}

    @cached_property
    def readers(self) -> list[list[int]]:
        """For each task, those that wait for it."""
        found: list[list[int]] = [[] for _ in self.reads]
        for i, earlier in enumerate(self.reads):
            for j in earlier:
                found[j].append(i)
        return found

    @cached_property
    def sorted(self) -> list[int]:
        """Depth first."""
        order, seen = [], set()
        stack = [(i, False) for i in reversed(range(len(self.reads)))]
        while stack:
            i, done = stack.pop()
            if done:
                order.append(i)
            elif i not in seen:
                seen.add(i)
                stack.append((i, True))
                stack += [(j, False) for j in self.reads[i] if j not in seen]
        return order


_FORM = attrgetter("name", "streams", "reads", "writes", "verb", "kind", "layer", "direction", "of")


@lru_cache(maxsize=4096)
def _wiring(form: tuple) -> Wiring:
    return Wiring([task[:4] for task in form])


@dataclass(frozen=True)
class Pass:
    """Tasks of a forward or a backward pass; those that nothing inside writes are its inputs."""

    tasks: tuple[Task, ...]

    @cached_property
    def by_name(self) -> dict[str, Task]:
        return {t.name: t for t in self.tasks}

    @cached_property
    def wiring(self) -> Wiring:
        """Shared by passes that differ in sizes only."""
        return _wiring(tuple(map(_FORM, self.tasks)))

    @property
    def writers(self) -> dict[str, tuple[str, ...]]:
        """value -> names of the tasks that write it."""
        return self.wiring.writers

    @property
    def after(self) -> dict[str, tuple[str, ...]]:
        """task -> tasks that must end before it starts."""
        return self.wiring.after

    def check_order(self, order: Iterable[str], what: str) -> None:
        """Raise ValueError unless order holds every task once, each after those it depends on."""
        order = tuple(order)
        unknown = [n for n in order if n not in self.by_name]
        if unknown:
            raise ValueError(f"{what} names task {unknown[0]!r}, which the plan's graph does not have")
        missing = [n for n in self.by_name if n not in set(order)]
        if missing:
            raise ValueError(f"{what} must name every task once, task {missing[0]!r} is missing")
        if len(order) != len(self.tasks):
            twice = next(n for n in order if order.count(n) > 1)
            raise ValueError(f"{what} must name every task once, got {twice!r} twice")
        place = {n: i for i, n in enumerate(order)}
        for name in order:
            for earlier in self.after[name]:
                if place[earlier] > place[name]:
                    raise ValueError(f"{what}: task {name!r} must come after task {earlier!r}, whose result it reads")

    def check_spans(self, order: Iterable[str], spans: Iterable[Span], what: str) -> None:
        """Raise ValueError unless each span's collective can fly from its first to its last task."""
        place = {n: i for i, n in enumerate(order)}
        for s in spans:
            for name in (s.task, s.first, s.last):
                if name not in place:
                    raise ValueError(f"{what}: span of {s.task!r} names task {name!r}, which the graph does not have")
            if not place[s.task] < place[s.first] <= place[s.last]:
                raise ValueError(f"{what}: span of {s.task!r} must be issued before its first task {s.first!r}, and "
                                 f"that not after its last, {s.last!r}")
            for name, at in place.items():
                if at <= place[s.last] and s.task in self.after[name]:
                    raise ValueError(f"{what}: task {name!r} reads the result of {s.task!r} before the end of its "
                                     f"span, task {s.last!r}")


@dataclass(frozen=True)
class TaskGraph:
    """What a segment of the stack must do. again: the forward pass at the backward pass's degrees, whose tasks the
    backward ones pull or run again. tail: reductions of the last segment's gradients, after everything else; of other
    segments', they are part of the next one's backward pass."""

    forward: Pass
    backward: Pass
    again: Pass
    tail: Pass


@dataclass(frozen=True)
class Degrees:
    """Number of chunks: of MoE and of other tasks, forward and backward."""

    moe_forward: int = 1
    moe_backward: int = 1
    dense_forward: int = 1
    dense_backward: int = 1

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"schedule.degrees.{name} must be a positive integer, got {value!r}")


def family(value: str) -> str:
    """"rows.0.1@2" -> "rows"; "d:x.0@0" -> "x"."""
    return value.removeprefix("d:").partition("@")[0].partition(".")[0]
