"""A plan as a JAX program, inside shard_map.

Each stream's order is held by chains of `optimization_barrier`: an input of a task is tied to the output of the task
before it. A collective that flies beside compute tasks is also tied to the first one's input and to the last one's
output (its span), so that XLA keeps exactly these between its start and its end, with no cost model of its own.

The stack is one custom VJP. Its forward scan keeps the values that the plan saves; its backward scan runs the plan's
backward tasks, each the pull (VJP) of a forward task, or that task again, and holds the gradients of the segment above,
whose reductions are tasks of this one. Forward-mode differentiation (jvp, hessian) through it is not possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..collectives import Counters, added, after, no_counters, pmax, psum, turn
from ..compat import vary_like, vary_over
from .block import Block, pieces
from .plan import Plan
from .streams import Call, Env, in_turns, issue
from .tasks import INTEGERS, Pass, Span, Task, family, scope

Counts = dict[str, Counters]   # by tensor class


class Verb(NamedTuple):
    """What tasks of a verb do on local arrays.

    run(task, reads, consts): values of task.writes. pull(task, cotangents, values, consts): cotangents of what the
    backward task writes, from those of what the forward task wrote and the values it needs; None = the VJP of `run`,
    for tasks whose reads are all among the needed values. consts: arrays without gradients, see `stack`.
    holds_collectives: whether compute tasks of the verb have some, such as in a loop or a conditional.
    """

    run: Callable[..., tuple]
    pull: Callable[..., tuple] | None = None
    holds_collectives: bool = False


Verbs = Mapping[str, Verb]
Watch = Callable[[Task, Callable[[tuple, Any], tuple], tuple, Any], None]
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Programs traced meanwhile show every task as watch(task, run, reads, consts): run(reads, consts) is what it
    writes."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def stack(plan: Plan, verbs: Verbs, in_turn: bool = False) -> Callable[..., tuple[jax.Array, Any, Counts]]:
    """f(x_BSD, params, consts, layered, sink=None) -> x_BSD, aux with a leading dim over layers, counted; to be called
    inside shard_map.

    counted: tensor class -> counters of the coded collectives of the forward pass, with a leading dim over segments,
    means over devices (of pools, the fullest). Those of the backward pass are the gradient of sink, `no_counts(block)`.
    params: name -> [layers, ...]; consts, layered: trees of arrays without gradients, the same in all layers, or with a
    leading dim over them. Verbs get both, as one dict. in_turn: whether collectives wait for one another as data, where
    compute tasks hold some: see `jaxmoe.collectives.turns`.
    """
    plan.check()
    block, segment = plan.block, plan.block.segment
    count = block.layers // segment
    run = _Program(plan, verbs, in_turn)

    @jax.custom_vjp
    def f(x_BSD, params, consts, layered, sink):
        return forward(x_BSD, params, consts, layered, sink)[0]

    def forward(x_BSD, params, consts, layered, sink):
        def body(x_BSD, per_segment):
            params, layered = per_segment
            return run.forward(x_BSD, params, consts, layered)

        x_BSD, (aux, saved, counted) = _scan(body, x_BSD, (by_segment(params), by_segment(layered)), count)
        aux = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux)
        counted = over_devices(counted, block)
        return (run.last(x_BSD, counted), aux, counted), (saved, params, consts, layered)

    def backward(residuals, cotangents):
        saved, params, consts, layered = residuals
        dx_BSD, daux, _ = cotangents
        stacked = (saved, *(by_segment(tree) for tree in (params, layered, daux)))
        dx_BSD, grads, counted = _backward(run, count, dx_BSD, stacked, consts)
        whole = jax.tree.map(lambda g, p: g.reshape(p.shape).astype(p.dtype), grads, params)
        return dx_BSD, whole, None, None, over_devices(counted, block)

    def by_segment(tree):
        return jax.tree.map(lambda a: a.reshape(count, segment, *a.shape[1:]), tree)

    f.defvjp(forward, backward)
    return lambda x_BSD, params, consts, layered, sink=None: f(x_BSD, params, consts, layered, sink or no_counts(block))


def _backward(run: _Program, count: int, dx_BSD, stacked, consts) -> tuple[jax.Array, Env, Counts]:
    """dx_BSD, gradients by segment, and counters. stacked: by segment, what was saved, parameters, layered arrays and
    the cotangents of aux."""
    grads = jax.tree.map(lambda p: vary_like(jnp.zeros(p.shape, p.dtype), p), stacked[1])

    def step(n, dx_BSD, pending):
        saved, params, layered, daux = jax.tree.map(lambda a: _at(a, n), stacked)
        return run.backward(dx_BSD, daux, saved, params, consts, layered, pending)

    dx_BSD, own, _, counted = step(count - 1, dx_BSD, None)
    pending, direct = run.divide(own)
    grads = _put(grads, direct, count - 1)

    def body(i, carry):
        dx_BSD, pending, grads, counted = carry
        n = count - 2 - i
        dx_BSD, own, reduced, new = step(n, dx_BSD, pending)
        assert reduced is not None   # as something was pending
        pending, direct = run.divide(own)
        return dx_BSD, pending, _put(_put(grads, reduced, n + 1), direct, n), both(counted, new)

    if count > 1:
        dx_BSD, pending, grads, counted = jax.lax.fori_loop(
            0, count - 1, body, (dx_BSD, pending, grads, counted))
    reduced, new = run.reduce(pending, consts)
    grads = _put(grads, reduced, 0)
    return dx_BSD, grads, both(counted, new)


def no_counts(block: Block) -> Counts:
    """Zero, of every tensor class that is coded."""
    return {name: no_counters() for name, _ in block.codec}


def both(one: Counts, other: Counts) -> Counts:
    return {name: added(one[name], other[name]) for name in one}


def over_devices(counted: Counts, block: Block) -> Counts:
    """Means over devices; of pools, the fullest."""
    axes = tuple(a for a, _ in block.axes)
    means = {name: jax.tree.map(lambda a: psum(a, axes) / block.size(axes), c) for name, c in counted.items()}
    return {name: means[name]._replace(pool_used=pmax(c.pool_used, axes)) for name, c in counted.items()}


def _scan(body, carry, xs, count: int):
    """lax.scan, unrolled where there is one step."""
    if count > 1:
        return jax.lax.scan(body, carry, xs)
    carry, ys = body(carry, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], ys)


def _at(a, n):
    return a[n] if isinstance(n, int) else jax.lax.dynamic_index_in_dim(a, n, 0, keepdims=False)


def _put(grads: Env, new: Env, n) -> Env:
    """grads[name][n] = new[name], in place where XLA can."""
    return grads | {k: jax.lax.dynamic_update_index_in_dim(grads[k], v.astype(grads[k].dtype), n, 0)
                    for k, v in new.items()}


class _Program:
    """A segment's forward and backward pass on dicts of named values."""

    def __init__(self, plan: Plan, verbs: Verbs, in_turn: bool):
        self.plan, self.verbs, self.block, self.graph = plan, verbs, plan.block, plan.graph
        self.in_turn = in_turn and any(v.holds_collectives for v in verbs.values())
        first, last = "@0", f"@{self.block.segment}"
        made = [v for t in self.graph.forward.tasks for v in t.writes]
        self.outputs = [v for v in made if family(v) == "x" and v.endswith(last)]
        self.inputs = [v.removesuffix(last) + first for v in self.outputs]
        self.aux = [v for v in made if family(v) == "aux"]
        written = {v for t in self.graph.backward.tasks for v in t.writes}
        needed = dict.fromkeys(v for t in self.graph.backward.tasks for v in t.reads)
        self.needed = [v for v in needed if v not in written and ":" not in v]
        self.recut = plan.degrees.moe_forward != plan.degrees.moe_backward
        self.slices = pieces(self.block, plan.slices)
        self.reduced = dict.fromkeys(p.param.name for parts in self.slices for p in parts)

    def forward(self, x_BSD, params, consts, layered):
        """x_BSD, (aux of each layer, saved values, counters)."""
        env = self._params(params) | dict(zip(self.inputs, self._split(x_BSD), strict=True))
        finish = self._run(self.graph.forward, self.plan.forward, self.plan.forward_spans, env, consts, layered, x_BSD)
        aux = jax.tree.map(lambda *a: jnp.stack(a), *(env[v] for v in self.aux))
        return finish(self._join([env[v] for v in self.outputs])), (aux, self._saved(env), self._counted(env))

    def backward(self, dx_BSD, daux, saved, params, consts, layered, pending):
        """dx_BSD, gradients of this segment's parameters before reduction, reduced ones of the segment above's, and
        counters."""
        env = self._params(params) | self._restored(saved)
        env |= {f"d:{v}": d for v, d in zip(self.outputs, self._split(dx_BSD), strict=True)}
        env |= {f"d:{v}": jax.tree.map(lambda a, i=i: a[i], daux) for i, v in enumerate(self.aux)}
        order, pass_ = self.plan.backward, self.graph.backward
        if pending is None:
            order = tuple(n for n in order if pass_.by_name[n].verb != "grad_reduce")
        else:
            env |= {f"pending:{name}@{i}": a[i] for name, a in pending.items() for i in range(self.block.segment)}
        spans = tuple(s for s in self.plan.backward_spans if s.task in set(order))
        finish = self._run(pass_, order, spans, env, consts, layered, (dx_BSD, saved))
        layers = range(self.block.segment)
        own = {p.name: jnp.stack([env[f"d:{p.name}@{i}"] for i in layers]) for p in self.block.params}
        dx_BSD = finish(self._join([env[f"d:{v}"] for v in self.inputs]))
        return dx_BSD, own, None if pending is None else self._whole(env), self._counted(env)

    def divide(self, own: Env) -> tuple[Env, Env]:
        """Gradients that need a reduction, and those that do not, whose axes have one device each."""
        axes = {p.name: p.reduce for p in self.block.params}
        return ({k: v for k, v in own.items() if k in self.reduced},
                {k: psum(v, axes[k]) for k, v in own.items() if k not in self.reduced})

    def reduce(self, pending: Env, consts) -> tuple[Env, Counts]:
        """The gradients of the last segment, beside which nothing is left to run, and counters."""
        env = {f"pending:{name}@{i}": a[i] for name, a in pending.items() for i in range(self.block.segment)}

        def call(task: Task, reads: tuple) -> tuple:
            with jax.named_scope(scope(task, tail=True)):
                return self._call(task, reads, consts)

        run = self._calls(call, pending)
        for task in self.graph.tail.tasks:
            env |= dict(zip(task.writes, run(task, tuple(env[v] for v in task.reads)), strict=True))
        return self._whole(env), self._counted(env)

    def _counted(self, env: Env) -> Counts:
        """Sums over the tasks of each tensor class."""
        found = {name: [zero] for name, zero in no_counts(self.block).items()}
        for v, counters in env.items():
            if family(v) == "counted":
                found[v.split(".")[1]].append(counters)
        return vary_over({name: added(*c) for name, c in found.items()}, tuple(a for a, _ in self.block.axes))

    def _whole(self, env: Env) -> Env:
        """Reduced gradients put together from their pieces."""
        found: dict[str, list[tuple[int, list]]] = {}
        for parts in self.slices:
            for p in parts:
                layers = [env[f"g:{p.param.name}.{p.lo}.{p.hi}@{i}"] for i in range(self.block.segment)]
                found.setdefault(p.param.name, []).append((p.lo, layers))
        join = lambda parts: parts[0] if len(parts) == 1 else jnp.concatenate(parts)  # noqa: E731
        return {name: jnp.stack([join([layers[i] for _, layers in sorted(parts, key=lambda q: q[0])])
                                 for i in range(self.block.segment)]) for name, parts in found.items()}

    def _params(self, params: Env) -> Env:
        return {f"p:{name}@{i}": a[i] for name, a in params.items() for i in range(self.block.segment)}

    def _split(self, x_BSD):
        parts = len(self.inputs)
        return [x_BSD] if parts == 1 else jnp.split(x_BSD, parts, self.block.token_dim)

    def _join(self, parts):
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, self.block.token_dim)

    def _saved(self, env: Env) -> Env:
        """What the backward pass needs; whole where its chunks are others than the forward pass's."""
        if not self.recut:
            return {v: env[v] for v in self.needed}
        made = {}
        for v in self.needed:
            stem = _stem(v)
            chunks = range(self.plan.degrees.moe_forward)
            made[stem] = env[v] if stem == v else jax.tree.map(
                lambda *a: jnp.concatenate(a, -2), *(env[_chunk(stem, i)] for i in chunks))
        return made

    def _restored(self, saved: Env) -> Env:
        if not self.recut:
            return dict(saved)
        env: Env = {}
        degree = self.plan.degrees.moe_backward
        for v, whole in saved.items():
            if _chunk(v, 0) not in self.needed:
                env[v] = whole
                continue
            leaves, tree = jax.tree.flatten(whole)
            cut = [jnp.split(a, degree, -2) for a in leaves]
            env |= {_chunk(v, i): tree.unflatten([c[i] for c in cut]) for i in range(degree)}
        return env

    def _run(self, pass_: Pass, order: Sequence[str], spans: Sequence[Span], env: Env, consts, layered,
             start) -> Callable:
        """Run tasks, which adds to env, once start is there; returns what ties a result of the pass to the end of every
        stream."""

        def call(task: Task, reads: tuple) -> tuple:
            with jax.named_scope(scope(task)):
                return self._call(task, reads, consts | jax.tree.map(lambda a: a[task.layer], layered))

        return issue(pass_, order, spans, env, self._calls(call, start), self.plan.barriers)

    def _calls(self, call: Call, start) -> Call:
        return in_turns(call, lambda t: self.verbs[t.verb].holds_collectives, start) if self.in_turn else call

    def last(self, values, earlier):
        """values, once what came earlier is there, if collectives take turns."""
        return after(values, turn(earlier)) if self.in_turn else values

    def _call(self, task: Task, reads: tuple, consts) -> tuple:
        """What the task writes."""
        run = self._again if not task.of or task.direction == "recompute" else self._pull
        watch = _watch.get()
        if watch is not None:
            watch(task, partial(run, task), reads, consts)
        return run(task, reads, consts)

    def _again(self, task: Task, reads: tuple, consts) -> tuple:
        """A forward task, or those of its values that are wanted again."""
        if not task.of:
            return self.verbs[task.verb].run(task, reads, consts)
        forward = self._of(task)
        made = dict(zip(forward.writes, self.verbs[task.verb].run(forward, reads, consts), strict=True))
        return tuple(made[v] for v in task.writes)

    def _pull(self, task: Task, reads: tuple, consts) -> tuple:
        forward, verb = self._of(task), self.verbs[task.verb]
        values = dict(zip(task.reads, reads, strict=True))
        written = [v for v in forward.writes if family(v) not in INTEGERS]
        cotangents = tuple(values.pop(f"d:{v}") for v in written)
        if verb.pull is not None:
            found = verb.pull(task, cotangents, values, consts)
            if found is not NotImplemented:
                return found
        wants = [v.removeprefix("d:") for v in task.writes]

        def run(*wanted):
            at = values | dict(zip(wants, wanted, strict=True))
            outs = verb.run(forward, tuple(at[v] for v in forward.reads), consts)
            made = dict(zip(forward.writes, outs, strict=True))
            return tuple(made[v] for v in written)

        _, pullback = jax.vjp(run, *(values[v] for v in wants))
        return pullback(cotangents)

    def _of(self, task: Task) -> Task:
        return self.graph.again.by_name[task.of]


def _stem(value: str) -> str:
    """"rows.0.1@2" -> "rows.0@2"; others as they are."""
    name, at, layer = value.partition("@")
    parts = name.split(".")
    return ".".join(parts[:2]) + at + layer if len(parts) == 3 else value


def _chunk(stem: str, i: int) -> str:
    name, at, layer = stem.partition("@")
    return f"{name}.{i}{at}{layer}"
