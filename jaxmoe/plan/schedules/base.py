"""What schedules share: orders of a pass, from an order to a plan, and the choice between candidates by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..block import SAVED, Block
from ..cluster import Cluster
from ..cost import durations
from ..graph import task_graph
from ..orders import Order, Quick
from ..plan import Plan
from ..simulate import Prepared, Slowdown, issue_order, pin, simulate_pass, sure_seconds
from ..tasks import STREAMS, Degrees, Pass, Span, Task, TaskGraph

DEGREES = (1, 2, 4, 8)
SLICES = (1, 2, 4, 8)
NEAR = 1.02   # times the fastest order's seconds: orders between which certainty decides,
RIVALS = 3    # at most so many
Key = Callable[[Task], tuple]


@dataclass(frozen=True)
class Orders:
    """How a schedule orders a pass, given the seconds of its tasks; forward and backward."""

    forward: Order
    backward: Order


@dataclass(frozen=True)
class Choice:
    """What a schedule may choose: degrees, orders, and pieces of the dense gradient's reduction."""

    degrees: Degrees
    orders: Orders
    slices: int = 1


def by(key: Key) -> Order:
    """The order in which each stream serves its tasks sorted by key; ties keep the order of the graph."""
    return lambda pass_, seconds: merged(pass_, key)


def merged(pass_: Pass, key: Key) -> tuple[str, ...]:
    """An issue order in which each stream serves its tasks sorted by key; coding that waits for a collective behind
    what compute has not done yet lets that go first.

    Raises ValueError if the sorted streams wait for each other otherwise.
    """
    ranked = sorted(pass_.tasks, key=key)
    queues = {s: [t for t in ranked if s in t.streams] for s in STREAMS}
    heads, done, order = dict.fromkeys(STREAMS, 0), set(), []
    while len(order) < len(ranked):
        for s in STREAMS:
            at = heads[s]
            task = queues[s][at] if at < len(queues[s]) else None
            if task is not None and all(queues[o][heads[o]] is task for o in task.streams) and (
                    set(pass_.after[task.name]) <= done):
                break
        else:
            task = _instead_of_coding(queues["compute"], heads["compute"], lambda t: set(pass_.after[t.name]) <= done)
            if task is None:
                stuck = next(queues[s][heads[s]].name for s in STREAMS if heads[s] < len(queues[s]))
                raise ValueError(f"the streams' orders wait for each other at task {stuck!r}")
        order.append(task.name)
        done.add(task.name)
        for s in task.streams:
            heads[s] += 1
    return tuple(order)


def _instead_of_coding(queue: list[Task], head: int, is_ready: Callable[[Task], bool]) -> Task | None:
    """The next task of a queue that is ready, moved to its head, if coding is there."""
    if head == len(queue) or queue[head].kind.partition(":")[0] not in ("encode", "decode"):
        return None
    task = next((t for t in queue[head:] if is_ready(t)), None)
    if task is not None:
        queue.remove(task)
        queue.insert(head, task)
    return task


@dataclass
class Trials:
    """Passes of a block under different choices, each simulated once.

    contention: planned with; None = blind to it, as the papers' schedules are.
    """

    block: Block
    cluster: Cluster
    saved: tuple[str, ...] = SAVED
    contention: Slowdown | None = None
    tried: dict[tuple, float] = field(default_factory=dict)
    ideal: dict[tuple, float] = field(default_factory=dict)
    orders: dict[tuple, tuple[str, ...]] = field(default_factory=dict)
    costs: dict[int, tuple[Pass, dict[str, float], Quick]] = field(default_factory=dict)

    def graph(self, choice: Choice) -> TaskGraph:
        """Raises ValueError if the block cannot be cut so."""
        return task_graph(self.block, choice.degrees, self.saved, choice.slices)

    def fits(self, choice: Choice) -> bool:
        """Whether the block can be cut so."""
        try:
            self.block.check_degrees(choice.degrees)
        except ValueError:
            return False
        return True

    def seconds(self, choice: Choice) -> float:
        """Of a segment, forward and backward."""
        graph = self.graph(choice)
        return (self.pass_seconds(graph.forward, choice.orders.forward) +
                self.pass_seconds(graph.backward, choice.orders.backward))

    def pass_seconds(self, pass_: Pass, order: Order) -> float:
        key = id(pass_), order
        if key not in self.tried:
            alone = self.alone(pass_, order)
            self.tried[key] = alone if self.contention is None else (
                Prepared(pass_, self.orders[key]).makespan(self._cost(pass_)[1], self.contention))
        return self.tried[key]

    def alone(self, pass_: Pass, order: Order) -> float:
        """Seconds without contention: as long or shorter, and quick to get."""
        key = id(pass_), order
        if key not in self.ideal:
            _, seconds, quick = self._cost(pass_)
            self.orders[key] = order(pass_, seconds)
            self.ideal[key] = quick.makespan(self.orders[key])
        return self.ideal[key]

    def bound(self, choice: Choice) -> float:
        """Seconds of a segment that no order goes below."""
        graph = self.graph(choice)
        return sum(self._cost(p)[2].bound() for p in (graph.forward, graph.backward))

    def _cost(self, pass_: Pass) -> tuple[Pass, dict[str, float], Quick]:
        """The pass, which keeps its id its own, and what its tasks take."""
        if id(pass_) not in self.costs:
            seconds = durations(pass_, self.cluster)
            self.costs[id(pass_)] = pass_, seconds, Quick(pass_, seconds)
        return self.costs[id(pass_)]

    def fastest(self, choices: Iterable[Choice]) -> Choice:
        """The first of the fastest; one that the block cannot be cut like if that is so for all, at equal degrees.

        Raises ValueError if the block can be cut at none of several degrees.
        """
        choices = tuple(choices)
        fit = [c for c in choices if self.fits(c)]
        if fit:
            return min(fit, key=self.seconds)
        if len({c.degrees for c in choices}) > 1:
            raise ValueError("schedule.degrees: this block cannot be cut at any of the degrees tried")
        return choices[0]

    def search(self, orders: Iterable[Orders], degrees: Iterable[Degrees], slices: Iterable[int] = (1,)) -> Choice:
        """The fastest orders and degrees at the first number of slices; then, at these degrees, orders and slices."""
        orders, degrees, slices = tuple(orders), tuple(degrees), tuple(slices)
        best = self.fastest([Choice(d, o, slices[0]) for o in orders for d in degrees])
        return self.fastest([best, *(Choice(best.degrees, o, n) for o in orders for n in slices[1:])])

    def surest(self, pass_: Pass, orders: Iterable[Order]) -> Order:
        """Of orders that are nearly the fastest, the one that loses least if XLA leaves untied collectives in line."""
        ranked = sorted(orders, key=lambda o: self.pass_seconds(pass_, o))
        least = self.pass_seconds(pass_, ranked[0])
        near = [o for o in ranked[:RIVALS] if self.pass_seconds(pass_, o) <= least * NEAR]
        return min(near, key=lambda o: self._sure(pass_, o))

    def _sure(self, pass_: Pass, order: Order) -> float:
        listed, spans = self.tied(pass_, order)
        return sure_seconds(pass_, listed, self._cost(pass_)[1], spans, self.contention)

    def tied(self, pass_: Pass, order: Order) -> tuple[tuple[str, ...], tuple[Span, ...]]:
        """Issue order, and what flies beside what."""
        seconds = self._cost(pass_)[1]
        return pin(pass_, self.listed(pass_, order), seconds, contention=self.contention)[:2]

    def listed(self, pass_: Pass, order: Order) -> tuple[str, ...]:
        """Issue order by start times."""
        self.pass_seconds(pass_, order)
        seconds = self._cost(pass_)[1]
        return issue_order(simulate_pass(pass_, self.orders[id(pass_), order], seconds, contention=self.contention))

    def plan(self, name: str, choice: Choice, tied: bool = True) -> Plan:
        """tied: False leaves to XLA what flies beside what. Raises ValueError if the block cannot be cut so."""
        graph = self.graph(choice)
        made = [self.tied(p, o) if tied else (self.listed(p, o), ())
                for p, o in ((graph.forward, choice.orders.forward), (graph.backward, choice.orders.backward))]
        (forward, forward_spans), (backward, backward_spans) = made
        return Plan(name, self.block, choice.degrees, forward, backward, forward_spans, backward_spans, self.saved,
                    choice.slices).check()


def moe_degrees(block: Block) -> list[Degrees]:
    """Degrees of MoE parts to try: forward and backward apart, where the layout allows it."""
    if block.chunk != "slots":
        return [Degrees(r, r, r, r) for r in DEGREES]
    if block.layout == "ragged":
        return [Degrees(r, r) for r in DEGREES]
    return [Degrees(f, b) for f in DEGREES for b in DEGREES]


def all_degrees(block: Block) -> list[Degrees]:
    """Degrees of MoE and of other parts to try, each apart where the chunks allow it."""
    if block.chunk == "slots":
        return moe_degrees(block)
    return [Degrees(moe, moe, dense, dense) for moe in DEGREES for dense in DEGREES]


def place(task: Task, ranks: dict[str, int], default: int = 0) -> int:
    """Rank of a task's verb; backward tasks are looked up as "verb:suffix"."""
    suffix = task.name.partition(":")[2]
    return ranks.get(f"{task.verb}:{suffix}" if suffix else task.verb, default)
