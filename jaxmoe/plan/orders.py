"""Orders of a pass: from an order of compute alone, and found by search.

Search is list scheduling by longest path, then descent by moving single tasks (ours).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from .simulate import Prepared, issue_order, least_seconds
from .tasks import STREAMS, Pass, Task, Wiring

Order = Callable[[Pass, Mapping[str, float]], tuple[str, ...]]
NO_GAP = 1e-3     # above the bound: no search
ROUNDING = 1e-12


def fixed(order: Callable[[Pass], tuple[str, ...]]) -> Order:
    """An order that no size changes: found once for all passes that are wired alike."""
    return lambda pass_, seconds: remembered(pass_, order, lambda: order(pass_))


def remembered(pass_: Pass, key: Any, order: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """The order that `key` stands for, for all passes that are wired alike."""
    memo = pass_.wiring.memo
    if key not in memo:
        memo[key] = order()
    return memo[key]


def behind(attention: Sequence[list[str]], experts: Sequence[list[str]], lag: int) -> list[str]:
    """Tasks of attention's chunks, and of the experts' chunks each `lag` attention chunks behind the last of its own.

    Chunks cut the same tokens in the same direction; what is left of the experts comes last.
    """
    order, placed = [], 0
    for i, chunk in enumerate(attention):
        order += chunk
        while placed < len(experts) and -(-(placed + 1) * len(attention) // len(experts)) + lag <= i + 1:
            order += experts[placed]
            placed += 1
    return order + [name for chunk in experts[placed:] for name in chunk]


def fed(pass_: Pass, rows: Iterable[str], eager: Callable[[Task], bool]) -> tuple[str, ...]:
    """An order with these tasks as given, each behind what it waits for, and eager ones as soon as they can start."""
    readers: dict[str, list[str]] = {}
    for name, earlier in pass_.after.items():
        for a in earlier:
            readers.setdefault(a, []).append(name)
    order: dict[str, None] = {}

    def issue(name: str) -> None:
        for earlier in pass_.after[name]:
            if earlier not in order:
                issue(earlier)
        if name in order:   # it was eager
            return
        order[name] = None
        for later in readers.get(name, ()):
            if later not in order and eager(pass_.by_name[later]) and all(a in order for a in pass_.after[later]):
                issue(later)

    for name in (*rows, *pass_.by_name):
        issue(name)
    return tuple(order)


def list_order(pass_: Pass, durations: Mapping[str, float]) -> tuple[str, ...]:
    """Whenever a stream is free it takes, of the tasks that may start, the one with the longest chain behind it."""
    wiring, names = pass_.wiring, list(pass_.by_name)
    seconds = [durations[n] for n in names]
    rank = [(-chain, i) for i, chain in enumerate(chains(wiring, seconds))]
    missing = [len(r) for r in wiring.reads]
    ready: dict[tuple[int, ...], list[tuple[float, int]]] = {held: [] for held in wiring.streams}
    for i, m in enumerate(missing):
        if not m:
            heapq.heappush(ready[wiring.streams[i]], rank[i])
    flying: list[tuple[float, int]] = []
    busy: set[int] = set()
    now, order = 0.0, []
    while len(order) < len(names) or flying:
        while heads := [heap[0] for held, heap in ready.items() if heap and busy.isdisjoint(held)]:
            i = min(heads)[1]
            heapq.heappop(ready[wiring.streams[i]])
            busy.update(wiring.streams[i])
            order.append(i)
            heapq.heappush(flying, (now + seconds[i], i))
        now, done = heapq.heappop(flying)
        busy.difference_update(wiring.streams[done])
        for later in wiring.readers[done]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready[wiring.streams[later]], rank[later])
    return tuple([names[i] for i in order])


def chains(wiring: Wiring, seconds: Sequence[float]) -> list[float]:
    """For each task, seconds of the longest chain of tasks that starts with it."""
    chain = [0.0] * len(seconds)
    for i in reversed(wiring.sorted):
        chain[i] += seconds[i]
        for j in wiring.reads[i]:
            if chain[i] > chain[j]:
                chain[j] = chain[i]
    return chain


def topological(pass_: Pass) -> list[str]:
    """Names of tasks, each after those that it reads from."""
    return [pass_.tasks[i].name for i in pass_.wiring.sorted]


class Quick:
    """Makespans of many orders of one pass, without spans and contention: as `Prepared`, some ten times as fast."""

    def __init__(self, pass_: Pass, durations: Mapping[str, float]):
        self.wiring = pass_.wiring
        self.seconds = [durations[t.name] for t in pass_.tasks]

    @cached_property
    def bound(self) -> float:
        """Seconds that no order goes below."""
        wiring = self.wiring
        return least_seconds(wiring.reads, wiring.streams, self.seconds, wiring.sorted)

    @cached_property
    def busiest(self) -> float:
        """Seconds of the stream with most work."""
        total = [0.0] * len(STREAMS)
        for held, seconds in zip(self.wiring.streams, self.seconds, strict=True):
            for s in held:
                total[s] += seconds
        return max(total)

    def makespan(self, order: Iterable[str]) -> float:
        """Raises ValueError if the streams' orders wait for each other."""
        index = self.wiring.index
        return self.of([index[n] for n in order])

    @cached_property
    def chains(self) -> list[float]:
        """For each task, seconds of the longest chain of tasks that starts with it."""
        return chains(self.wiring, self.seconds)

    def of(self, numbers: Sequence[int], most: float = math.inf) -> float:
        """`makespan` of an order of the tasks' numbers; infinite as soon as it is known to be more than `most`."""
        reads, streams, seconds, behind = self.wiring.reads, self.wiring.streams, self.seconds, self.chains
        end, free = [-1.0] * len(numbers), [0.0] * len(STREAMS)
        for i in numbers:
            start = 0.0
            for j in reads[i]:
                if end[j] > start:
                    start = end[j]
                elif end[j] < 0:   # it is listed before one that it reads from
                    return self._searched(numbers)
            for s in streams[i]:
                if free[s] > start:
                    start = free[s]
            if start + behind[i] > most * (1 + ROUNDING):
                return math.inf
            end[i] = start = start + seconds[i]
            for s in streams[i]:
                free[s] = start
        return max(end, default=0.0)

    def by_start(self, numbers: Sequence[int]) -> list[int]:
        """The same order of every stream, of tasks listed behind what they read from, by start times."""
        start, end, free = self.seconds.copy(), self.seconds.copy(), [0.0] * len(STREAMS)
        for i in numbers:
            held = self.wiring.streams[i]
            start[i] = max([*[end[j] for j in self.wiring.reads[i]], *[free[s] for s in held]])
            end[i] = start[i] + self.seconds[i]
            for s in held:
                free[s] = end[i]
        return sorted(numbers, key=start.__getitem__)

    def _searched(self, numbers: Sequence[int]) -> float:
        before: list[tuple[int, ...]] = [()] * len(numbers)
        last = [-1] * len(STREAMS)
        for i in numbers:
            queued = [last[s] for s in self.wiring.streams[i] if last[s] >= 0]
            before[i] = (*self.wiring.reads[i], *queued)
            for s in self.wiring.streams[i]:
                last[s] = i
        end = [-1.0] * len(numbers)
        for i in numbers:
            if end[i] < 0:
                self._end(i, before, end)
        return max(end, default=0.0)

    def _end(self, i: int, before: list[tuple[int, ...]], end: list[float]) -> None:
        """Fill in the end of task i and of all that it waits for, depth first."""
        stack, open_ = [i], set()
        while stack:
            at = stack[-1]
            start = 0.0
            waits = -1
            for j in before[at]:
                if end[j] < 0:
                    waits = j
                    break
                if end[j] > start:
                    start = end[j]
            if waits < 0:
                end[at] = start + self.seconds[at]
                open_.discard(at)
                stack.pop()
            elif waits in open_:
                raise ValueError("order has tasks wait for each other")
            else:
                open_.add(at)
                stack.append(waits)


def descend(pass_: Pass, order: Sequence[str], durations: Mapping[str, float], trials: int = 200,
            seed: int = 0) -> tuple[str, ...]:
    """The order after `trials` random moves of one task before another of its stream, each kept unless it is slower.

    Tasks are listed by start times, and none is moved before one that it reads from, or behind one that reads from it.
    It ends early where no order can be faster.
    """
    pick, quick, wiring = random.Random(seed), Quick(pass_, durations), pass_.wiring
    timeline = Prepared(pass_, order).run(durations)
    best = [wiring.index[n] for n in issue_order(timeline)]
    least, goal = quick.of(best), quick.bound * (1 + NO_GAP)
    place = {i: k for k, i in enumerate(best)}
    for _ in range(trials):
        if least <= goal:
            break
        moved = pick.choice(best)
        first = max([place[j] for j in wiring.reads[moved]], default=-1) + 1
        last = min([place[j] for j in wiring.readers[moved]], default=len(best))
        held = wiring.streams[moved]
        others = [i for i in best[first:last] if i != moved and (
            wiring.streams[i] == held or not set(held).isdisjoint(wiring.streams[i]))]
        if not others:
            continue
        trial = best.copy()
        trial.remove(moved)
        trial.insert(trial.index(pick.choice(others)), moved)
        seconds = quick.of(trial, least)
        if seconds <= least:
            best, least = quick.by_start(trial) if seconds < least else trial, seconds
            place = {i: k for k, i in enumerate(best)}
    return tuple([pass_.tasks[i].name for i in best])


def improved(order: Order) -> Order:
    """The order after descent."""
    return lambda pass_, seconds: descend(pass_, order(pass_, seconds), seconds)
