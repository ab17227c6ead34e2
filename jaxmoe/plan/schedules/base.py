"""What schedules share: orders of a pass, from an order to a plan, and the choice between candidates by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..block import SAVED, Block
from ..cluster import Cluster
from ..cost import durations
from ..graph import task_graph
from ..memory import Memory, estimate
from ..orders import Order, Quick, fixed, improved
from ..plan import Plan
from ..simulate import Prepared, Slowdown, issue_order, simulate_pass
from ..spans import pin, sure_seconds
from ..tasks import STREAMS, Degrees, Pass, Span, Task, TaskGraph

DEGREES = (1, 2, 4, 8)
SLICES = (1, 2, 4, 8)
NEAR = 1.02   # times the fastest order's seconds: orders between which certainty decides,
RIVALS = 3    # at most so many
TRIED = 3     # orders of a pass that are simulated with contention
Key = Callable[[Task], tuple]
Listed = tuple[tuple[str, ...], tuple[Span, ...]]


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


def _as_listed(pass_: Pass, seconds: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(pass_.by_name)


def by(key: Key) -> Order:
    """The order in which each stream serves its tasks sorted by key; ties keep the order of the graph."""
    return fixed(lambda pass_: merged(pass_, key))


def merged(pass_: Pass, key: Key) -> tuple[str, ...]:
    """An issue order in which each stream serves its tasks sorted by key; coding that waits for a collective behind
    what compute has not done yet lets that go first.

    Raises ValueError if the sorted streams wait for each other otherwise.
    """
    ranked = sorted(pass_.tasks, key=key)
    queues = {s: [t for t in ranked if s in t.streams] for s in STREAMS}
    heads, done, order, after = dict.fromkeys(STREAMS, 0), set(), [], pass_.after

    def is_ready(task: Task) -> bool:
        return done.issuperset(after[task.name])

    def next_of(stream: str) -> Task | None:
        """The stream's next task, if that is the next of all its streams and may start."""
        queue, at = queues[stream], heads[stream]
        if at == len(queue) or not is_ready(queue[at]):
            return None
        task = queue[at]
        return task if len(task.streams) == 1 or all(queues[s][heads[s]] is task for s in task.streams) else None

    while len(order) < len(ranked):
        task = next((t for s in STREAMS if (t := next_of(s))), None)
        task = task or _instead_of_coding(queues["compute"], heads["compute"], is_ready)
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


class Costs(NamedTuple):
    """A pass and the seconds of its tasks."""

    pass_: Pass
    seconds: dict[str, float]
    quick: Quick


@dataclass
class Tried:
    """An order of a pass, its seconds without contention and under others, and its ties where they were asked for."""

    order: tuple[str, ...]
    alone: float
    contended: dict[Slowdown, float] = field(default_factory=dict)
    tied: dict[Slowdown | None, Listed] = field(default_factory=dict)


@dataclass
class Trials:
    """Passes of a block under different choices, each simulated once.

    contention: planned with; None = blind to it, as the papers' schedules are.
    """

    block: Block
    cluster: Cluster
    saved: tuple[str, ...] = SAVED
    contention: Slowdown | None = None
    graphs: dict[tuple, TaskGraph] = field(default_factory=dict)
    costs: dict[int, Costs] = field(default_factory=dict)
    orders: dict[tuple, Tried] = field(default_factory=dict)
    chosen: dict[tuple, Order] = field(default_factory=dict)
    descents: dict[Order, Order] = field(default_factory=dict)

    def under(self, contention: Slowdown | None) -> Trials:
        """The same passes, planned with this contention; what is known of them is shared."""
        return replace(self, contention=contention)

    def graph(self, choice: Choice) -> TaskGraph:
        """Raises ValueError if the block cannot be cut so."""
        key = choice.degrees, choice.slices
        if key not in self.graphs:
            self.graphs[key] = task_graph(self.block, choice.degrees, self.saved, choice.slices)
        return self.graphs[key]

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
        slow, tried = self.contention, self._tried(pass_, order)
        if slow is None:
            return tried.alone
        if slow not in tried.contended:
            prepared = Prepared(pass_, tried.order)
            tried.contended[slow] = prepared.makespan(self.of(pass_).seconds, slow)
        return tried.contended[slow]

    def alone(self, pass_: Pass, order: Order) -> float:
        """Seconds without contention: as long or shorter, and quick to get."""
        return self._tried(pass_, order).alone

    def _tried(self, pass_: Pass, order: Order) -> Tried:
        key = id(pass_), order
        if key not in self.orders:
            costs = self.of(pass_)
            listed = order(pass_, costs.seconds)
            same = id(pass_), listed   # other orders may come to the same list
            if same not in self.orders:
                self.orders[same] = Tried(listed, costs.quick.makespan(listed))
            self.orders[key] = self.orders[same]
        return self.orders[key]

    def fastest_of(self, pass_: Pass, orders: tuple[Order, ...]) -> Order:
        """Under contention, of those that are among the `TRIED` fastest without."""
        key = id(pass_), orders, self.contention
        if key not in self.chosen:
            ranked = sorted(orders, key=lambda order: self.alone(pass_, order))
            tried = ranked[:1 if self.contention is None else TRIED]
            self.chosen[key] = min(tried, key=lambda order: self.pass_seconds(pass_, order))
        return self.chosen[key]

    def probe(self, choice: Choice) -> float:
        """Seconds of a segment without contention."""
        graph = self.graph(choice)
        return self.alone(graph.forward, choice.orders.forward) + self.alone(graph.backward, choice.orders.backward)

    def bound(self, choice: Choice) -> float:
        """Seconds of a segment that no order goes below."""
        graph = self.graph(choice)
        return self.of(graph.forward).quick.bound + self.of(graph.backward).quick.bound

    def least(self) -> float:
        """Seconds of a segment that no choice goes below: chunks add to what a stream has to do, and take nothing."""
        graph = self.graph(Choice(Degrees(), Orders(_as_listed, _as_listed)))
        return self.of(graph.forward).quick.busiest + self.of(graph.backward).quick.busiest

    def of(self, pass_: Pass) -> Costs:
        """What its tasks take; kept with the pass, whose id stays its own."""
        if id(pass_) not in self.costs:
            seconds = durations(pass_, self.cluster)
            self.costs[id(pass_)] = Costs(pass_, seconds, Quick(pass_, seconds))
        return self.costs[id(pass_)]

    def fastest(self, choices: Iterable[Choice]) -> Choice:
        """The fastest choice that the block can be cut at. If there is none and all have the same degrees, the first
        one, so that cutting it raises the error that says why.

        Raises ValueError if the block can be cut at none of several degrees.
        """
        choices = tuple(choices)
        fit = [c for c in choices if self.fits(c)]
        if fit:
            return min(fit, key=self.seconds)
        if len({c.degrees for c in choices}) > 1:
            raise ValueError("schedule.degrees: this block cannot be cut at any of the degrees tried")
        return choices[0]

    def memory(self, choice: Choice, outside: float = 0.0) -> Memory:
        """What the choice takes on a device; see `memory.estimate`."""
        graph, orders = self.graph(choice), choice.orders
        return estimate(self.block, graph, self._tried(graph.forward, orders.forward).order,
                        self._tried(graph.backward, orders.backward).order, outside)

    def search(self, orders: Iterable[Orders], degrees: Iterable[Degrees], slices: Iterable[int] = (1,)) -> Choice:
        """The fastest orders and degrees at the first number of slices; then, at these degrees, orders and slices."""
        orders, degrees, slices = tuple(orders), tuple(degrees), tuple(slices)
        best = self.fastest([Choice(d, o, slices[0]) for o in orders for d in degrees])
        return self.fastest([best, *(Choice(best.degrees, o, n) for o in orders for n in slices[1:])])

    def refined(self, choice: Choice) -> Choice:
        """With orders improved by moving single tasks, unless that is slower."""
        graph, orders = self.graph(choice), choice.orders
        forward = min(self.improved(orders.forward), orders.forward,
                      key=lambda o: self.pass_seconds(graph.forward, o))
        backward = min(self.improved(orders.backward), orders.backward,
                       key=lambda o: self.pass_seconds(graph.backward, o))
        return replace(choice, orders=Orders(forward, backward))

    def improved(self, order: Order) -> Order:
        """The order after descent, one and the same each time."""
        if order not in self.descents:
            self.descents[order] = improved(order)
        return self.descents[order]

    def sure(self, choice: Choice, forward: Iterable[Order], backward: Iterable[Order]) -> Choice:
        """With the surest of these orders, see `surest`."""
        graph = self.graph(choice)
        return replace(choice, orders=Orders(self.surest(graph.forward, dict.fromkeys(forward)),
                                             self.surest(graph.backward, dict.fromkeys(backward))))

    def surest(self, pass_: Pass, orders: Iterable[Order]) -> Order:
        """Of orders that are nearly the fastest, the one that loses least if XLA leaves untied collectives in line."""
        ranked = sorted(orders, key=lambda o: self.pass_seconds(pass_, o))
        least = self.pass_seconds(pass_, ranked[0])
        near = [o for o in ranked[:RIVALS] if self.pass_seconds(pass_, o) <= least * NEAR]
        return min(near, key=lambda o: self._sure(pass_, o)) if len(near) > 1 else near[0]

    def _sure(self, pass_: Pass, order: Order) -> float:
        listed, spans = self.tied(pass_, order)
        return sure_seconds(pass_, listed, self.of(pass_).seconds, spans, self.contention)

    def tied(self, pass_: Pass, order: Order) -> Listed:
        """Issue order, and what flies beside what."""
        tied = self._tried(pass_, order).tied
        if self.contention not in tied:
            listed, seconds = self.listed(pass_, order), self.of(pass_).seconds
            tied[self.contention] = pin(pass_, listed, seconds, contention=self.contention)[:2]
        return tied[self.contention]

    def listed(self, pass_: Pass, order: Order) -> tuple[str, ...]:
        """Issue order by start times."""
        listed, seconds = self._tried(pass_, order).order, self.of(pass_).seconds
        return issue_order(simulate_pass(pass_, listed, seconds, contention=self.contention))

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


@dataclass(frozen=True)
class Schedule:
    """What a system is known by; called, it gives a plan. Of `orders`, `degrees` and `slices` the fastest in simulation
    are taken, blind to contention, as the papers' systems are.

    cut: the block, as it is cut. refined: orders are improved by search. tied: False = what flies beside what is left
    to XLA.
    """

    name: str
    orders: tuple[Orders, ...]
    degrees: Callable[[Block], Sequence[Degrees]]
    slices: tuple[int, ...] = (1,)
    cut: Callable[[Block], Block] = lambda block: block
    refined: bool = False
    tied: bool = True

    def __call__(self, block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
                 saved: tuple[str, ...] = SAVED) -> Plan:
        """degrees, slices: None = the fastest in simulation. Raises ValueError if the block cannot be cut so."""
        trials = Trials(self.cut(block), cluster, saved)
        return self.plan(trials, self.choose(trials, degrees, slices))

    def choose(self, trials: Trials, degrees: Degrees | None = None, slices: int | None = None) -> Choice:
        best = trials.search(self.orders, [degrees] if degrees else self.degrees(trials.block),
                             [slices] if slices else self.slices)
        return trials.refined(best) if self.refined else best

    def plan(self, trials: Trials, choice: Choice) -> Plan:
        if self.refined:
            forward, backward = zip(*((o.forward, o.backward) for o in (choice.orders, *self.orders)), strict=True)
            choice = trials.sure(choice, forward, backward)
        return trials.plan(self.name, choice, self.tied)


@dataclass
class Bench:
    """Trials of all the ways to cut a block, each made once."""

    cluster: Cluster
    saved: tuple[str, ...] = SAVED
    made: dict[Block, Trials] = field(default_factory=dict)

    def trials(self, block: Block, contention: Slowdown | None = None) -> Trials:
        if block not in self.made:
            self.made[block] = Trials(block, self.cluster, self.saved)
        return self.made[block].under(contention)


def only_one(block: Block) -> list[Degrees]:
    """No chunks."""
    return [Degrees()]


def place(task: Task, ranks: dict[str, int], default: int = 0) -> int:
    """Rank of a task's verb; backward tasks are looked up as "verb:suffix"."""
    suffix = task.name.partition(":")[2]
    return ranks.get(f"{task.verb}:{suffix}" if suffix else task.verb, default)
