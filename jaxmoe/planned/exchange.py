"""All-to-Alls of rows: in one task, or coded before and decoded after, in three."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..collectives import Counters, all_to_all, compressed
from ..plan.block import Block
from ..plan.execute import Counts, Verb
from ..plan.tasks import Task, codec_of
from ..types import TENSOR_CLASSES, Axes

Change = Callable[[jax.Array], jax.Array]
# How each metric of `metrics_of` is put together from several.
CODEC_METRICS = {f"codec_{field}_{name}": jnp.max if field == "pool_used" else jnp.sum
                 for name in TENSOR_CLASSES for field in Counters._fields}


class Ends(NamedTuple):
    """split: rows -> [devices, ...], what goes to each. join: what came from each -> rows."""

    split: Change
    join: Change


def exchange_verbs(block: Block, verb: str, forward: Ends, backward: Ends) -> dict[str, Verb]:
    """Tasks of the exchange `verb`, in one step or in two. Its transpose is an exchange with other ends."""
    found, steps = {}, block.steps(verb)
    for i, (step, axes) in enumerate(steps):
        is_first, is_last = i == 0, i == len(steps) - 1
        there = Ends(forward.split if is_first else _same, forward.join if is_last else _same)
        back = Ends(backward.split if is_last else _same, backward.join if is_first else _same)
        found |= _step_verbs(block, step, axes, _over(block, axes, there), _over(block, axes, back))
    return found


def _same(rows: jax.Array) -> jax.Array:
    return rows


def _over(block: Block, axes: Axes, ends: Ends) -> Ends:
    """The ends of a step over some of the exchange's axes, to which rows for devices of all of them come."""
    every, _ = block.exchanges
    if axes == every:
        return ends
    sizes, places = tuple(block.size((a,)) for a in every), tuple(every.index(a) for a in axes)
    to_front = (*places, *(i for i in range(len(every)) if i not in places))

    def split(rows: jax.Array) -> jax.Array:
        """[all devices, ...] -> [devices of the step, others, ...]."""
        rows_P = ends.split(rows)
        rest = tuple(range(len(every), len(every) + rows_P.ndim - 1))
        turned = rows_P.reshape(*sizes, *rows_P.shape[1:]).transpose(*to_front, *rest)
        return turned.reshape(block.size(axes), -1, *rows_P.shape[1:])

    def join(came: jax.Array) -> jax.Array:
        shape = came.shape[2:]
        rest = tuple(range(len(every), len(every) + len(shape)))
        turned = came.reshape(*(sizes[i] for i in to_front), *shape)
        return ends.join(turned.transpose(*(to_front.index(i) for i in range(len(every))), *rest).reshape(-1, *shape))

    return Ends(split, join)


def _step_verbs(block: Block, verb: str, axes: Axes, forward: Ends, backward: Ends) -> dict[str, Verb]:
    """An All-to-All, or where it is coded, three tasks; its transpose is coded as well."""
    if verb not in dict(block.codec):
        return {verb: linear(_plain(axes, forward), _plain(axes, backward))}
    send = lambda message: compressed.send(message, axes)  # noqa: E731
    return {
        f"encode_{verb}": Verb(lambda task, reads, consts: _encode(task, axes, forward, reads[0]),
                               lambda task, cotangents, *_: _decode(task, axes, backward, cotangents[0]),
                               holds_collectives=True),
        verb: linear(send, send),
        f"decode_{verb}": Verb(lambda task, reads, consts: _decode(task, axes, forward, reads[0]),
                               lambda task, cotangents, *_: _encode(task, axes, backward, cotangents[0]),
                               holds_collectives=True),
    }


def _plain(axes: Axes, ends: Ends) -> Change:
    return lambda rows: ends.join(all_to_all(ends.split(rows), axes))


def _encode(task: Task, axes: Axes, ends: Ends, rows: jax.Array) -> tuple[compressed.Message]:
    codec = codec_of(task)
    assert codec is not None
    return (compressed.pack(ends.split(rows), compressed.How(codec, axes)),)


def _decode(task: Task, axes: Axes, ends: Ends, message: compressed.Message) -> tuple[jax.Array, Counters]:
    codec = codec_of(task)
    assert codec is not None
    rows, counters = compressed.unpack(message, compressed.How(codec, axes))
    return ends.join(rows), counters


def metrics_of(counted: Counts) -> dict[str, jax.Array]:
    """Counters as metrics: "codec_fallbacks_dispatch" and the like."""
    return {f"codec_{field}_{name}": value for name, counters in counted.items()
            for field, value in counters._asdict().items()}


def linear(forward: Callable, backward: Callable) -> Verb:
    """Of one value to one value; neither direction needs others."""
    return Verb(lambda task, reads, consts: (forward(reads[0]),),
                lambda task, cotangents, values, consts: (backward(cotangents[0]),))

