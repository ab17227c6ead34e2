"""Tasks issued in order, inside a JAX program that keeps it: ties between tasks by `optimization_barrier`.

Each stream's tasks are tied one to the next. A collective that flies beside compute tasks is also tied to the first
one's input and to the last one's output (its span).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..collectives import after, turn
from ..compat import vary_like, varying_axes
from .tasks import Pass, Span, Task

Env = dict[str, Any]
Call = Callable[[Task, tuple], tuple]   # what the task writes, of what it reads


def issue(pass_: Pass, order, spans, env: Env, call: Call, barriers: bool) -> Callable:
    """Run tasks in order, tied as the module's doc says. Values of env are added to where they are cotangents."""
    if not barriers:
        for name in order:
            task = pass_.by_name[name]
            _commit(task, call(task, tuple(env[v] for v in task.reads)), env)
        return lambda result: result
    streams = _Streams(env, call)
    span_of = {s.task: s for s in spans}
    waiting: dict[str, list[Task]] = {}
    for name in order:
        task = pass_.by_name[name]
        if name in span_of:
            waiting.setdefault(span_of[name].first, []).append(task)
            continue
        if task.is_collective:   # a stream keeps its order: what waits on it for a compute task starts now
            for tasks in waiting.values():
                for earlier in [t for t in tasks if set(t.streams) & set(task.streams)]:
                    tasks.remove(earlier)
                    streams.run(earlier, [], span_of[earlier.name].last)
        streams.run(task, waiting.pop(name, []), None, span_of)
    return streams.finish


def in_turns(call: Call, holds_collectives: Callable[[Task], bool], start: Any) -> Call:
    """call, in which collectives and tasks that hold some wait for one another as data, the first for start. A compute
    task's parameters do not wait."""
    last = turn(start)

    def run(task: Task, reads: tuple) -> tuple:
        nonlocal last
        if not task.is_collective and not holds_collectives(task):
            return call(task, reads)
        outs = call(task, tuple(wait(task, v, r) for v, r in zip(task.reads, reads, strict=True)))
        last = last | turn(outs)
        return outs

    def wait(task: Task, name: str, value):
        if not name.startswith("p:"):
            return after(value, last)
        return after(vary_like(value, last), last) if task.is_collective else value   # gathered, and then varying

    return run


class _Streams:
    """The tasks in flight, and a token for each stream that says how far it has come.

    A token goes into a barrier with an input of a task and comes out with it, and again with an output: so the next
    task of the stream waits for this one. XLA drops from a barrier what nothing uses afterwards, one by one from the
    end; so the last tokens must be used by a result (`finish`).
    """

    def __init__(self, env: Env, call: Call):
        self.env, self.call = env, call
        self.tokens: dict[str, jax.Array] = {}
        self.ending: dict[str, list[tuple[Task, tuple]]] = {}

    def run(self, task: Task, beside: list[Task], last: str | None, span_of: Mapping[str, Span] | None = None) -> None:
        """task, and the collectives whose spans begin with it. last: of its own span, if it has one."""
        used: set[str] = set()
        together, after = [], []
        for c in beside:   # of each stream, one starts with the task, and others when that one has ended
            (after if used & set(c.streams) else together).append(c)
            used |= set(c.streams)
        *begun, reads = _tied_together([(self._inputs(t), t.is_collective) for t in (*together, task)])
        for c, r in zip(together, begun, strict=True):
            self._finish(c, self.call(c, r), span_of[c.name].last if span_of else None)
        for c in after:
            self._finish(c, self.call(c, self._inputs(c)), span_of[c.name].last if span_of else None)
        outs = self.call(task, reads)
        ended = self.ending.pop(task.name, [])
        *others, outs = _tied_together([*((o, True) for _, o in ended), (outs, True)])
        for (c, _), o in zip(ended, others, strict=True):
            self._complete(c, o)
        self._finish(task, outs, last)

    def finish(self, result: jax.Array) -> jax.Array:
        """result, bit for bit, once all streams have come to their end. Tokens are zeros, which XLA cannot know."""
        if not self.tokens:
            return result
        return jnp.where(sum(self.tokens.values()) == 0, result, jnp.zeros_like(result))

    def _inputs(self, task: Task) -> tuple:
        reads = tuple(self.env[v] for v in task.reads)
        for stream in task.streams:
            if stream in self.tokens:
                reads, self.tokens[stream] = _tied(reads, self.tokens[stream], task.is_collective)
        return reads

    def _finish(self, task: Task, outs: tuple, last: str | None) -> None:
        if last is None:
            self._complete(task, outs)
        else:
            self.ending.setdefault(last, []).append((task, outs))

    def _complete(self, task: Task, outs: tuple) -> None:
        for stream in task.streams:
            token = self.tokens.get(stream)
            if token is None:
                token = _token(outs)
            outs, self.tokens[stream] = _tied(outs, token, True)
        _commit(task, outs, self.env)


def _token(outs: tuple) -> jax.Array:
    zero = jnp.zeros((), jnp.float32)
    picked = _pick(outs)
    return vary_like(zero, picked[0][1]) if picked else zero


def _commit(task: Task, outs: tuple, env: Env) -> None:
    for name, value in zip(task.writes, outs, strict=True):
        if name.startswith("d:") and name in env:
            value = jax.tree.map(jnp.add, env[name], value)
        env[name] = value


def _tied(values: tuple, token: jax.Array, every: bool) -> tuple[tuple, jax.Array]:
    """values and token, neither there before the other."""
    picked = _pick(values, every)
    if picked:   # a token that varies less would not come out of the barrier as it went in
        token = vary_like(token, picked[0][1])
    *tied, after = _barrier([picked, [(0, token)]])
    return _replaced(values, tied[0]), after[0][1]


def _tied_together(groups: list[tuple[tuple, bool]]) -> list[tuple]:
    """Values of each group tied to those of each other; of a group one, or every."""
    if len(groups) < 2:
        return [values for values, _ in groups]
    picks = _barrier([_pick(values, every) for values, every in groups])
    return [_replaced(values, tied) for (values, _), tied in zip(groups, picks, strict=True)]


def _barrier(picks: list[list[tuple[int, jax.Array]]]) -> list[list[tuple[int, jax.Array]]]:
    """Picked arrays, none there before all are.

    jax 0.10 makes each as varying over the mesh as the most varying one; an array that would change so stays as it is.
    """
    flat = [a for pick in picks for _, a in pick]
    if len(flat) < 2:
        return picks
    after = iter(jax.lax.optimization_barrier(tuple(flat)))
    return [[(i, b if varying_axes(b) == varying_axes(a) else a) for (i, a), b in zip(pick, after, strict=False)]
            for pick in picks]


def _pick(values: tuple, every: bool = False) -> list[tuple[int, jax.Array]]:
    """Arrays of the first value that varies most over the mesh, or of every such, with their places among all arrays.

    Of what a compute task reads one is enough, and a barrier makes new arrays of all that it ties, weights included. Of
    what a collective reads every one counts, and of what a task makes: it may be several instructions in the compiled
    program, one a value, each of which would come when it likes.
    """
    best: list[tuple[int, jax.Array]] = []
    rank, at = (False, -1), 0
    for value in values:
        leaves = jax.tree.leaves(value)
        numbered = [(at + i, a) for i, a in enumerate(leaves)]
        at += len(leaves)
        floats = [(i, a) for i, a in numbered if jnp.issubdtype(a.dtype, jnp.inexact) or a.dtype == jnp.uint8]
        found = floats or numbered[:1]
        if found:
            new = (bool(floats), min(len(varying_axes(a)) for _, a in found))
            if new > rank:
                best, rank = found, new
            elif every and new == rank:
                best = best + found
    return best


def _replaced(values: tuple, new: list[tuple[int, jax.Array]]) -> tuple:
    leaves, tree = jax.tree.flatten(values)
    for i, a in new:
        leaves[i] = a
    return tree.unflatten(leaves)
