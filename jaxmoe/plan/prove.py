"""A plan against the program that XLA compiled: what flies beside what, and in which order.

The compiled text of a GPU program is its schedule. A collective that does not block is a pair of instructions, start
and done; every instruction carries the name of the task that it came from. Needs no GPU: XLA compiles for a described
one (`pip install 'jaxmoe[prove]'`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .cluster import Cluster, gpu_description
from .cost import durations
from .orders import topological
from .plan import Plan
from .tasks import STREAMS, Pass, Span, Task, scope

COLLECTIVE = re.compile(r"^(all-to-all|all-gather|reduce-scatter|all-reduce|collective-permute|ragged-all-to-all)")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
SCOPE = re.compile(r"(?:tail_)?task_[\w.]+")
SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+|c64|c128)\[([\d,]*)\]")
PRODUCT_NAME = re.compile(r"gemm|cublas|matmul|cudnn")
PRODUCT_CALL = re.compile(r'(?:"kind"|custom_call_target)[:=]"__?\w*(?:gemm|cublas|cudnn|triton_kernel|mosaic)')
COMBINE_BYTES = 1
NOT_WORK = {"get-tuple-element", "bitcast", "parameter", "constant", "tuple", "after-all", "iota", "partition-id"}


def compile_options(plan: Plan | None) -> dict[str, Any]:
    """XLA's options that a plan needs on GPUs; `train` uses the same.

    As many collectives in flight as there are links, a step's messages counted one by one, and none merged with
    another: merged ones would not be where the plan has them.
    """
    if plan is None:
        return {}
    links = {s for p in (plan.graph.forward, plan.graph.backward) for t in p.tasks for s in t.streams} - {"compute"}
    messages = plan.block.copies if plan.block.sharers > 1 else 1
    return {
        "xla_gpu_experimental_parallel_collective_overlap_limit": max(len(links), 1) + messages - 1,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        **{f"xla_gpu_{kind}_combine_threshold_bytes": COMBINE_BYTES
           for kind in ("all_reduce", "all_gather", "reduce_scatter")},
    }


def target_devices(cluster: Cluster) -> list[Any]:
    """Devices of the cluster, without any. Raises ValueError where the compiler for them is not installed."""
    from jax.experimental import topologies

    try:
        description = gpu_description(cluster.gpu)
        shape = f"1x{cluster.nodes}x{cluster.gpus_per_node}"
        return topologies.get_topology_desc(cluster.gpu, "cuda", target_config=description, topology=shape).devices
    except (RuntimeError, ModuleNotFoundError) as e:
        raise ValueError("prove needs XLA's compiler for NVIDIA GPUs: pip install 'jaxmoe[prove]' "
                         f"({str(e).splitlines()[0]})") from e


@dataclass(frozen=True)
class Instruction:
    """One scheduled instruction. scope: as `tasks.scope` names the task that it came from, or "". size: bytes of its
    result, and of operands that are part of a start's."""

    name: str
    op: str
    scope: str
    operands: str
    is_sync: bool
    text: str
    size: int = 0

    @property
    def is_product(self) -> bool:
        """A matrix product, as XLA names its own and library calls."""
        return self.op == "dot" or self.op in ("fusion", "custom-call") and bool(
            PRODUCT_NAME.search(self.name) or PRODUCT_CALL.search(self.text))


@dataclass(frozen=True)
class Flight:
    """A collective in a compiled program. beside: what ran between its start and its done, in order. size: bytes, to be
    compared with those of others of its task."""

    task: str
    kind: str
    is_async: bool
    beside: tuple[Instruction, ...]
    times: int
    size: int = 1


@dataclass(frozen=True)
class Computation:
    """A straight piece of a compiled program: the main one, or a loop's body. order: instructions as they start."""

    flights: tuple[Flight, ...]
    order: tuple[Instruction, ...]


def read(text: str) -> tuple[Computation, ...]:
    """The pieces of a compiled GPU program, loops' bodies once each."""
    computations = _computations(text)
    entry = next(name for name, lines in computations.items() if lines and lines[0].startswith("ENTRY"))
    found: list[Computation] = []
    _walk(entry, 1, computations, found)
    return tuple(found)


def _computations(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current = None
    for line in text.splitlines():
        if not line.startswith(" ") and (m := COMPUTATION.match(line)):
            current = found.setdefault(m.group(1), [line])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return found


def _walk(name: str, times: int, computations: dict[str, list[str]], found: list[Computation]) -> None:
    flights: list[Flight] = []
    order: list[Instruction] = []
    flying: dict[str, tuple[Instruction, list[Instruction]]] = {}
    for i in _instructions(computations[name]):
        if i.op == "while":
            trip = re.search(r'known_trip_count[^0-9]*(\d+)', i.text)
            body = re.search(r"body=%?([\w.\-]+)", i.text)
            if body:
                _walk(body.group(1), times * (int(trip.group(1)) if trip else 1), computations, found)
            continue
        kind = _kind(i)
        if kind and i.op.endswith("-start"):
            flying[i.name] = (i, [])
            order.append(i)
        elif i.op.endswith("-done"):
            started = re.search(r"%([\w.\-]+)", i.operands)
            if started and started.group(1) in flying:
                start, beside = flying.pop(started.group(1))
                flights.append(Flight(start.scope, _kind(start), not start.is_sync, tuple(beside), times, start.size))
        elif kind:
            order.append(i)
            flights.append(Flight(i.scope, kind, False, (), times, i.size))
        elif i.op not in NOT_WORK:
            order.append(i)
            for _, beside in flying.values():
                beside.append(i)
    found.append(Computation(tuple(flights), tuple(order)))


def _kind(i: Instruction) -> str:
    """Kind of collective, or ""."""
    m = COLLECTIVE.match(i.op) or COLLECTIVE.match(i.name)
    return m.group(1) if m else ""


def _instructions(lines: Iterable[str]) -> Iterator[Instruction]:
    for line in lines:
        m = INSTRUCTION.match(line)
        if m is None:
            continue
        name, shapes, op, rest = m.groups()
        scopes = SCOPE.findall(rest)
        yield Instruction(name, op, scopes[-1] if scopes else "", rest.split(")")[0], '"is_sync":true' in rest, rest,
                          _bytes(shapes))


def _bytes(shapes: str) -> int:
    """Of all arrays of a type's text."""
    return sum(_width(dtype) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in SHAPE.findall(shapes))


def _width(dtype: str) -> int:
    bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.sub(r"\D", "", dtype))
    return max(bits // 8, 1)


@dataclass
class Report:
    """What a compiled program makes of a plan. Bytes are those that one device sends in a step.

    bytes_beside: of collectives beside which any compute runs. bytes_overlapped: as far as it hides them, of each
    collective its bytes times the planned seconds of that compute over its own, at most 1. bytes_overlappable: of
    collectives for which the task graph holds a matrix product that neither waits for them nor they for it. missing:
    promised pairs (spans) that are not there. departures: tasks out of order.
    """

    collectives: int = 0
    async_collectives: int = 0
    bytes_total: float = 0.0
    bytes_beside: float = 0.0
    bytes_overlapped: float = 0.0
    bytes_overlappable: float = 0.0
    order_kept: bool = True
    peak_memory_bytes: int = 0
    missing: list[dict[str, Any]] = field(default_factory=list)
    departures: list[str] = field(default_factory=list)
    promised: int = 0
    unplanned: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all that was promised is there."""
        return not self.missing

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @cached_property
    def text(self) -> str:
        """The table, and what it comes to."""
        of = lambda part: f"{part / max(self.bytes_total, 1):.0%}"  # noqa: E731
        lines = [
            self.table, "",
            f"{self.async_collectives} of {self.collectives} collectives are asynchronous; "
            f"{of(self.bytes_beside)} of {self.bytes_total / 2**30:.2f} GiB fly beside compute, which hides "
            f"{of(self.bytes_overlapped)}; {of(self.bytes_overlappable)} could fly so",
            f"order {'kept' if self.order_kept else 'not kept: ' + '; '.join(self.departures[:5])}",
            f"peak memory {self.peak_memory_bytes / 2**30:.2f} GiB on a device; XLA options {self.options}",
        ]
        if self.unplanned:
            lines.append(f"collectives outside the plan: {self.unplanned}")
        for m in self.missing:
            lines.append(f"missing: {m['task']} was to fly beside {', '.join(m['promised'])}, but "
                         f"{'flies beside ' + ', '.join(m['found']) if m['found'] else 'flies beside nothing'}")
        lines.append(f"{self.promised - len(self.missing)} of {self.promised} promised overlaps are there")
        return "\n".join(lines)

    @cached_property
    def table(self) -> str:
        """One line a collective."""
        lines = [f"{'collective':34} {'kind':15} {'':6} {'MiB':>9} {'hidden':>7}  beside"]
        for r in self.rows:
            lines.append(f"{r['task']:34} {r['kind']:15} {'async' if r['is_async'] else 'SYNC':6} "
                         f"{r['bytes'] / 2**20:9.2f} {r['overlapped']:7.0%}  {', '.join(r['beside'][:4])}")
        return "\n".join(lines)


def judge(plan: Plan, program: tuple[Computation, ...], cluster: Cluster, peak_memory_bytes: int = 0) -> Report:
    """The plan against the program."""
    report = Report(peak_memory_bytes=peak_memory_bytes, options=compile_options(plan))
    graph, segments = plan.graph, plan.block.layers // plan.block.segment
    tail = tuple(t.name for t in graph.tail.tasks)
    parts = [_Part(pass_, order, spans, durations(pass_, cluster), times, is_tail)
             for pass_, order, spans, times, is_tail in (
                 (graph.forward, plan.forward, plan.forward_spans, segments, False),
                 (graph.backward, plan.backward, plan.backward_spans, segments, False),
                 (graph.tail, tail, (), 1, True))]
    for part in parts:
        _judge_part(report, part, program)
    for flight in (f for computation in program for f in computation.flights):
        report.collectives += flight.times
        report.async_collectives += flight.times * flight.is_async
        if not any(flight.task in part.by_scope for part in parts):
            report.unplanned[flight.kind] = report.unplanned.get(flight.kind, 0) + flight.times
    report.order_kept = not report.departures
    return report


@dataclass(frozen=True)
class _Part:
    """A pass of the plan, or the reductions behind the last one. segments: how often a step runs it."""

    pass_: Pass
    order: tuple[str, ...]
    spans: tuple[Span, ...]
    seconds: Mapping[str, float]
    segments: int
    is_tail: bool

    @cached_property
    def overlappable(self) -> set[str]:
        return _independent_products(self.pass_)

    @cached_property
    def by_scope(self) -> dict[str, Task]:
        return {scope(t, self.is_tail): t for t in self.pass_.tasks}

    def times(self, task: Task) -> int:
        """How often a step runs the task: reductions are of the segment above."""
        return self.segments - (task.verb == "grad_reduce" and self.segments > 1)

    def partners(self, span: Span) -> list[Task]:
        place = {n: i for i, n in enumerate(self.order)}
        inside = self.order[place[span.first]:place[span.last] + 1]
        return [t for t in (self.pass_.by_name[n] for n in inside) if not t.is_collective]


def _judge_part(report: Report, part: _Part, program: tuple[Computation, ...]) -> None:
    """Rows, promises and order of a part of the plan."""
    found: dict[str, list[Flight]] = {}
    for flight in (f for computation in program for f in computation.flights):
        task = part.by_scope.get(flight.task)
        if task is not None and task.is_collective:
            found.setdefault(task.name, []).append(flight)
    for name, flights in found.items():
        task, size = part.pass_.by_name[name], sum(f.size * f.times for f in flights)
        for flight in flights:
            # Of what the task does in a step, and of what it does at once
            share = flight.size * flight.times / max(size, 1)
            _row(report, part, task, flight, share * part.times(task), share * part.times(task) / flight.times)
    report.promised += len(part.spans)
    report.missing += [_missing(part, span, found.get(span.task, [])) for span in part.spans
                       if not _is_kept(part, span, found.get(span.task, []))]
    for computation in () if part.is_tail else program:   # nothing orders the tail's
        report.departures += _departures(part, computation)


def _is_kept(part: _Part, span: Span, flights: list[Flight]) -> bool:
    """Whether most bytes of the task fly beside what the span promises. Most: a task may be several collectives, such
    as a payload and a flag, or run in several pieces of the program, each of which is to keep the promise."""
    wanted = _wanted(part, span)
    kept = sum(f.size * f.times for f in flights
               if f.is_async and wanted & {t.name for t in _compute_beside(part, f)})
    return kept > sum(f.size * f.times for f in flights) / 2


def _row(report: Report, part: _Part, task: Task, flight: Flight, in_step: float, at_once: float) -> None:
    """in_step, at_once: the flight's share of the task, as often as a step runs that, and in one run of it."""
    beside = _compute_beside(part, flight)
    planned = part.seconds[task.name] * at_once
    share = min(1.0, sum(part.seconds[t.name] for t in beside) / max(planned, 1e-30)) if flight.is_async else 0.0
    sent = task.bytes * in_step
    report.bytes_total += sent
    report.bytes_beside += sent * (flight.is_async and bool(beside))
    report.bytes_overlapped += share * sent
    report.bytes_overlappable += sent * (task.name in part.overlappable)
    report.rows.append({"task": task.name, "kind": flight.kind, "is_async": flight.is_async, "times": flight.times,
                        "bytes": sent, "overlapped": share, "beside": [t.name for t in beside]})


def _wanted(part: _Part, span: Span) -> set[str]:
    """Tasks of which one must be beside: those with a matrix product, if the span has any."""
    partners = part.partners(span)
    return {t.name for t in partners if t.kind == "matmul"} or {t.name for t in partners}


def _missing(part: _Part, span: Span, flights: list[Flight]) -> dict[str, Any]:
    beside = dict.fromkeys(t.name for f in flights for t in _compute_beside(part, f))
    return {"task": span.task, "promised": sorted(_wanted(part, span)), "found": list(beside),
            "is_async": any(f.is_async for f in flights)}


def _compute_beside(part: _Part, flight: Flight) -> list[Task]:
    """Compute tasks of which the main work lies between start and done: a product of those that have one."""
    found: dict[str, Task] = {}
    for i in flight.beside:
        task = part.by_scope.get(i.scope)
        if task is not None and not task.is_collective and (i.is_product or task.kind != "matmul"):
            found.setdefault(task.name, task)
    return list(found.values())


def _independent_products(pass_: Pass) -> set[str]:
    """Collectives beside which some matrix product could run."""
    ancestors: dict[str, set[str]] = {}
    for name in topological(pass_):
        ancestors[name] = set().union(*(ancestors[a] | {a} for a in pass_.after[name]))
    products = [t.name for t in pass_.tasks if t.kind == "matmul"]
    return {t.name for t in pass_.tasks if t.is_collective and any(
        p not in ancestors[t.name] and t.name not in ancestors[p] for p in products)}


def _departures(part: _Part, computation: Computation) -> list[str]:
    """Tasks that end before one starts which the plan has earlier on the same stream, by their main instructions.

    Parts of a task that nothing holds back, such as products that it repeats of the forward pass, may come early.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, i in enumerate(computation.order):
        task = part.by_scope.get(i.scope)
        if task is not None and (_kind(i) if task.is_collective else i.is_product):
            first.setdefault(task.name, at)
            last[task.name] = at
    found = []
    for stream in STREAMS:
        tasks = [n for n in part.order if stream in part.pass_.by_name[n].streams and n in first]
        latest, before = -1, ""
        for name in tasks:
            if last[name] < latest:
                found.append(f"{name} runs before {before}")
            if first[name] > latest:
                latest, before = first[name], name
    return found
