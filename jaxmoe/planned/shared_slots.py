"""Slots that the devices of a `model` group share out, all of which gate all of its tokens (Parm's S2).

m devices of the group; each packs, sends and gets back a part [E, C / m] of every expert's slots, and puts its own
tokens together from all of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..collectives import all_gather, own_part, reduce_scatter
from ..collectives.stepwise import by_sender, by_step, from_steps, step
from ..plan.block import Block
from ..plan.execute import Verb
from ..plan.tasks import Task
from ..types import Axes, Groups, RowIndex
from .exchange import linear

BY_TOKEN = ("mask", "index", "segment", "forced")


def with_group(consts: dict[str, Any], block: Block) -> dict[str, Any]:
    """consts, and what they say of the tokens of the whole `model` group where its devices gate them: "group", of
    arrays [B, m, S, ...]."""
    if block.sharers == 1:
        return consts
    model = block.role("model")
    return consts | {"group": {n: all_gather(consts[n][:, None], model, 1) for n in BY_TOKEN if n in consts}}


def own_tokens(a_T: jax.Array, groups: Groups, axes: Axes) -> jax.Array:
    """This device's of the group's tokens [m T, ...], in the order of `tokens_of`."""
    by_group = a_T.reshape(groups.local, -1, *a_T.shape[1:])
    return own_part(by_group, axes, 1).reshape(-1, *a_T.shape[1:])


def slots_of_own_tokens(where: RowIndex, groups: Groups, axes: Axes) -> RowIndex:
    """Where this device's pairs lie in all slots."""
    T, K = where.row_TK.shape
    row_TK = own_tokens(where.row_TK, groups, axes)
    number_T = jnp.full(T, row_TK.shape[0]).reshape(groups.local, -1)
    at = jax.lax.axis_index(axes) * (row_TK.shape[0] // groups.local)
    mine = jnp.arange(row_TK.shape[0]).reshape(groups.local, -1)
    number_T = jax.lax.dynamic_update_slice_in_dim(number_T, mine, at, 1).reshape(-1)   # T where it is not its own
    number_T = jnp.append(number_T, row_TK.shape[0])
    pair_R = number_T[where.pair_R // K] * K + where.pair_R % K
    return RowIndex(row_TK, jnp.minimum(pair_R, row_TK.size))


def own_slots(where: RowIndex, num_experts: int, axes: Axes) -> RowIndex:
    """Where the group's pairs lie in this device's part of every expert's slots."""
    pair_EC = where.pair_R.reshape(num_experts, -1)
    slots = pair_EC.shape[1]
    mine_EC = own_part(pair_EC, axes, 1)
    size = mine_EC.shape[1]
    expert, slot = where.row_TK // slots, where.row_TK % slots
    here = (where.row_TK < pair_EC.size) & (slot // size == jax.lax.axis_index(axes))
    return RowIndex(jnp.where(here, expert * size + slot % size, mine_EC.size), mine_EC.reshape(-1))


def combine_verbs(block: Block) -> dict[str, Verb]:
    """An All-to-All in steps, each gathered over the group as it arrives.

    Values: out [devices, local E, C, D]; sent [devices with the same experts * local E, C, D], a step's; came [local E,
    C, D], after the sum over copies; met [local E, m, C, D]; back [E, m, C, D].
    """
    (axes, mates), model, copies = block.turns, block.role("model"), block.copies

    def split(task: Task, reads, consts):
        (out,) = reads
        steps = block.size(axes)
        return tuple(by_step(out.reshape(steps, -1, *out.shape[-2:]), axes))

    def unsplit(task: Task, cotangents, values, consts):
        g = from_steps(jnp.stack(cotangents), axes)
        return (g.reshape(block.size(axes) * copies, -1, *g.shape[-2:]),)

    def send(task: Task, reads, consts):
        (sent,) = reads
        return (step(sent.reshape(copies, -1, *sent.shape[-2:]), axes, mates, _shift(task.name)).sum(0),)

    def send_back(task: Task, cotangents, values, consts):
        (g,) = cotangents
        g = step(jnp.broadcast_to(g, (copies, *g.shape)), axes, mates, -_shift(task.of))
        return (g.reshape(-1, *g.shape[-2:]),)

    def gather(rows):
        return all_gather(rows[:, None], model, 1)

    def scatter(g):
        return reduce_scatter(g, model, 1)[:, 0]

    def join(task: Task, reads, consts):
        return (_by_sender(jnp.stack(reads)).reshape(-1, *reads[0].shape[1:]),)

    def unjoin(task: Task, cotangents, values, consts):
        (g,) = cotangents
        return tuple(_by_sender(g.reshape(len(task.writes), -1, *g.shape[1:])))

    def _by_sender(met):
        """[steps, local E, m, ...] by sender, and back."""
        return by_sender(met.swapaxes(1, 2), axes, model).swapaxes(1, 2)

    return {"combine_split": Verb(split, unsplit), "combine": Verb(send, send_back),
            "combine_gather": linear(gather, scatter), "combine_join": Verb(join, unjoin)}


def _shift(name: str) -> int:
    """Step of a task: "combine.0.1.3@2" -> 3."""
    return int(name.partition("@")[0].rpartition(".")[2])
