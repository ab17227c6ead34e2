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
from ..types import Axes

Change = Callable[[jax.Array], jax.Array]
# How a counter's metric is put together from several; see `Counters`.
CODEC_METRICS = {"wire_bytes": jnp.sum, "raw_bytes": jnp.sum, "pool_used": jnp.max, "fallbacks": jnp.sum}


class Ends(NamedTuple):
    """split: rows -> [devices, ...], what goes to each. join: what came from each -> rows."""

    split: Change
    join: Change


def exchange_verbs(block: Block, verb: str, forward: Ends, backward: Ends) -> dict[str, Verb]:
    """Tasks of the exchange `verb`. Its transpose is an exchange as well, with other ends, and coded as well."""
    axes, _ = block.exchanges
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

