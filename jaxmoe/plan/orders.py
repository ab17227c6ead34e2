"""Orders of a pass: from an order of compute alone, and found by search.

Search is list scheduling by longest path, then descent by moving single tasks (ours).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from .simulate import Prepared, issue_order, least_seconds
from .tasks import STREAMS, Pass, Task

Order = Callable[[Pass, Mapping[str, float]], tuple[str, ...]]


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
    names = list(pass_.by_name)
    after: dict[str, list[str]] = {n: [] for n in names}
    missing = {n: len(pass_.after[n]) for n in names}
    for name in names:
        for earlier in pass_.after[name]:
            after[earlier].append(name)
    chain = longest_chains(pass_, durations)
    ready = sorted(((-chain[n], i, n) for i, n in enumerate(names) if not missing[n]))
    flying: list[tuple[float, int, str]] = []
    free, now, order = set(STREAMS), 0.0, []
    place = {n: i for i, n in enumerate(names)}
    while ready or flying:
        waiting = []
        while ready:
            key = heapq.heappop(ready)
            streams = set(pass_.by_name[key[2]].streams)
            if streams <= free:
                free -= streams
                order.append(key[2])
                heapq.heappush(flying, (now + durations[key[2]], place[key[2]], key[2]))
            else:
                waiting.append(key)
        ready = waiting
        heapq.heapify(ready)
        now, _, name = heapq.heappop(flying)
        free |= set(pass_.by_name[name].streams)
        for later in after[name]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, (-chain[later], place[later], later))
    return tuple(order)


def longest_chains(pass_: Pass, durations: Mapping[str, float]) -> dict[str, float]:
    """Task -> seconds of the longest chain of tasks that starts with it."""
    chain = dict.fromkeys(pass_.by_name, 0.0)
    for name in reversed(topological(pass_)):
        chain[name] += durations[name]
        for earlier in pass_.after[name]:
            chain[earlier] = max(chain[earlier], chain[name])
    return chain


def topological(pass_: Pass) -> list[str]:
    """Names of tasks, each after those that it reads from."""
    order: list[str] = []
    seen: set[str] = set()
    stack = [(n, False) for n in reversed(list(pass_.by_name))]
    while stack:
        name, done = stack.pop()
        if done:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack += [(d, False) for d in pass_.after[name] if d not in seen]
    return order


class Quick:
    """Makespans of many orders of one pass, without spans and contention: as `Prepared`, some ten times as fast."""

    def __init__(self, pass_: Pass, durations: Mapping[str, float]):
        self.pass_ = pass_
        self.index = {n: i for i, n in enumerate(pass_.by_name)}
        self.seconds = [durations[n] for n in pass_.by_name]
        self.reads = [tuple(self.index[d] for d in pass_.after[n]) for n in pass_.by_name]
        self.streams = [tuple(STREAMS.index(s) for s in t.streams) for t in pass_.tasks]

    def bound(self) -> float:
        """Seconds that no order goes below."""
        order = [self.index[n] for n in topological(self.pass_)]
        place = {i: k for k, i in enumerate(order)}
        reads = [[place[j] for j in self.reads[i]] for i in order]
        return least_seconds(reads, [self.streams[i] for i in order], [self.seconds[i] for i in order])

    def makespan(self, order: Iterable[str]) -> float:
        """Raises ValueError if the streams' orders wait for each other."""
        numbers = [self.index[n] for n in order]
        before: list[tuple[int, ...]] = [()] * len(numbers)
        last = [-1] * len(STREAMS)
        for i in numbers:
            queued = [last[s] for s in self.streams[i] if last[s] >= 0]
            before[i] = (*self.reads[i], *queued)
            for s in self.streams[i]:
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

    The result is listed by start times.
    """
    pick, quick = random.Random(seed), Quick(pass_, durations)
    best, least = list(order), quick.makespan(order)
    sharing = {n: [o for o in order if o != n and set(pass_.by_name[o].streams) & set(pass_.by_name[n].streams)]
               for n in order}
    for _ in range(trials if len(best) > 1 else 0):
        name = pick.choice(best)
        if not sharing[name]:
            continue
        trial = [n for n in best if n != name]
        trial.insert(trial.index(pick.choice(sharing[name])), name)
        try:
            seconds = quick.makespan(trial)
        except ValueError:
            continue
        if seconds <= least:
            best, least = trial, seconds
    return issue_order(Prepared(pass_, best).run(durations))


def improved(order: Order) -> Order:
    """The order after descent."""
    return lambda pass_, seconds: descend(pass_, order(pass_, seconds), seconds)
