"""What a schedule is made of: tasks, the graph of those that must be done, and the plan that orders them.

A plan is data. It names tasks of a graph that follows from its block (`Plan.graph`), in the order in which they are
issued; each stream serves its own tasks in that order. It is executed, simulated, searched for and proven, and no
reader knows how it came about.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

STREAMS: tuple[str, ...] = ("compute", "intra", "inter")
PLAN_VERSION = 1

Direction = Literal["forward", "recompute", "grad", "input_grad", "weight_grad"]


@dataclass(frozen=True)
class Task:
    """One verb on one chunk.

    name: unique in its graph. streams: queues that it occupies from start to end. reads, writes: names of values; a
    cotangent is named "d:" + its value, and is the sum of what all its writers write. kind: what its time depends on,
    "matmul" (flops), "memory" (bytes through memory), or a collective ("all_to_all", "all_gather", "reduce_scatter",
    "all_reduce"; bytes that one device sends), "encode:FORMAT" or "decode:FORMAT" (bytes uncoded). A collective that
    codes by itself is of kind "all_gather:FORMAT" and the like; encoded, decoded: bytes uncoded that it then codes. of:
    in a backward pass, the forward task that it recomputes or pulls.
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

    @property
    def is_collective(self) -> bool:
        return self.streams != ("compute",)


def codec_of(task: Task) -> str | None:
    """Format that the task codes or decodes, as its kind says."""
    return task.kind.partition(":")[2] or None


@dataclass(frozen=True)
class Span:
    """Collective `task` flies from the start of compute task `first` to the end of compute task `last`."""

    task: str
    first: str
    last: str


@dataclass(frozen=True)
class Pass:
    """Tasks of a forward or a backward pass; those that nothing inside writes are its inputs."""

    tasks: tuple[Task, ...]

    @cached_property
    def by_name(self) -> dict[str, Task]:
        return {t.name: t for t in self.tasks}

    @cached_property
    def writers(self) -> dict[str, tuple[str, ...]]:
        """value -> names of the tasks that write it."""
        found: dict[str, tuple[str, ...]] = {}
        for t in self.tasks:
            for v in t.writes:
                found[v] = (*found.get(v, ()), t.name)
        return found

    @cached_property
    def after(self) -> dict[str, tuple[str, ...]]:
        """task -> tasks that must end before it starts."""
        return {t.name: tuple(dict.fromkeys(w for v in t.reads for w in self.writers.get(v, ()))) for t in self.tasks}

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


@dataclass(frozen=True)
class Plan:
    """Which tasks a segment of blocks is cut into, and their order.

    schedule: where it came from, for people. block: shapes, roles and layers (see `jaxmoe.plan.block.Block`).
    forward, backward: issue order. forward_spans, backward_spans: what flies beside what. saved: values kept for the
    backward pass, which recomputes all others that it needs. slices: pieces of the dense gradient's reduction.
    barriers: False gives the same tasks to XLA without an order, for comparison.

    Example: ``made = jaxmoe.plan(jaxmoe.load_config("configs/mixtral-8x7b-8x8-h100.toml")); assert
    jaxmoe.Plan.from_json(made.to_json()) == made``
    """

    schedule: str
    block: Any
    degrees: Degrees
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    forward_spans: tuple[Span, ...] = ()
    backward_spans: tuple[Span, ...] = ()
    saved: tuple[str, ...] = ()
    slices: int = 1
    barriers: bool = True

    @cached_property
    def graph(self) -> TaskGraph:
        return self.block.graph(self.degrees, self.saved, self.slices)

    def check(self) -> Plan:
        """self, if it can run; otherwise ValueError names the tasks."""
        g = self.graph
        for pass_, order, spans, what in ((g.forward, self.forward, self.forward_spans, "forward"),
                                          (g.backward, self.backward, self.backward_spans, "backward")):
            pass_.check_order(order, what)
            pass_.check_spans(order, spans, what)
        return self

    def to_json(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tree = {"version": PLAN_VERSION, **{k: _plain(v) for k, v in fields.items()}}
        return json.dumps(tree, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError for what is not a plan of this version, or cannot run."""
        from .block import Block

        try:
            tree = json.loads(text)
        except json.JSONDecodeError as e:
            raise ValueError(f"a plan must be JSON: {e}") from None
        if not isinstance(tree, dict) or tree.get("version") != PLAN_VERSION:
            got = tree.get("version") if isinstance(tree, dict) else type(tree).__name__
            raise ValueError(f"plan version must be {PLAN_VERSION}, got {got!r}")
        tree.pop("version")
        known = {f.name for f in dataclasses.fields(Plan)}
        if set(tree) - known:
            raise ValueError(f"a plan has no key {sorted(set(tree) - known)[0]!r}; known: {', '.join(sorted(known))}")
        try:
            tree |= {"block": Block.from_tree(tree["block"]), "degrees": Degrees(**tree["degrees"])}
            for key in ("forward_spans", "backward_spans"):
                tree[key] = tuple(Span(**s) for s in tree.get(key, ()))
            for key in ("forward", "backward", "saved"):
                tree[key] = tuple(tree.get(key, ()))
            plan = Plan(**tree)
        except (KeyError, TypeError) as e:
            raise ValueError(f"a plan lacks a key or has one too many: {e}") from None
        return plan.check()


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
