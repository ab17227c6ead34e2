"""Tasks of the slots layout: chunks are cuts of every expert's slots; routing and drops are the uncut layer's."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..collectives import all_gather, reduce_scatter
from ..dispatch import Slots
from ..dispatch.rows import pack, sum_over_choices, unpack
from ..dispatch.slots import index
from ..experts import experts_down, experts_up, experts_up_gradient
from ..plan.block import Block
from ..plan.execute import Verb
from ..plan.tasks import Degrees, Task
from ..spec import Spec
from ..types import Groups, Routing, RowIndex
from .exchange import Ends, exchange_verbs, linear
from .pieces import by_family, expert_weights
from .shared_slots import combine_verbs, own_slots, own_tokens, slots_of_own_tokens


@dataclass(frozen=True)
class SlotsLayout:
    """Values: slots, back [E, C, D]; rows, out [senders.., local E, C, D]; hidden [local E, senders, C, F].

    Where a group shares slots, C are a device's in all but back; see `shared_slots`.
    """

    block: Block
    degrees: Degrees
    spec: Spec
    holds_collectives: ClassVar[bool] = False

    @property
    def cuts(self) -> int:
        """Slots are padded to a multiple of this, so that forward and backward chunks are equal."""
        chunks = lcm(self.degrees.moe_forward, self.degrees.moe_backward) if self.block.chunk == "slots" else 1
        return chunks * self.block.sharers

    def choose(self, routing: Routing, groups: Groups) -> tuple[dict[str, Any], jax.Array]:
        spec, by_group = self.spec, lambda a: a.reshape(groups.local, -1, a.shape[1])
        assert isinstance(spec.dispatch, Slots)
        capacity = spec.dispatch.capacity(spec.router, groups.tokens, spec.num_experts)
        if self.block.chunk == "sequence":
            capacity = groups.tokens   # nothing is dropped: see `moe_block`
        where, dropped = index(by_group(routing.experts_TK), by_group(routing.chosen_TK), spec.num_experts, capacity,
                               groups.axes)
        where = self._padded(where)
        if self.block.sharers == 1:
            return {"where": where}, dropped
        model = self.block.role("model")
        own = slots_of_own_tokens(where, groups, model)
        without = own_tokens(routing.chosen_TK, groups, model) & (own.row_TK == where.pair_R.size)
        return {"where": own, "packed": own_slots(where, spec.num_experts, model)}, without.sum()

    def _padded(self, where: RowIndex) -> RowIndex:
        """Empty slots after each expert's own, up to a multiple of `cuts`."""
        E, empty = self.spec.num_experts, where.row_TK.size
        pair_EC = where.pair_R.reshape(E, -1)
        C = pair_EC.shape[1]
        pair_EC = jnp.pad(pair_EC, ((0, 0), (0, -C % self.cuts)), constant_values=empty)
        wide = pair_EC.shape[1]
        row_TK = jnp.where(where.row_TK < E * C, where.row_TK // C * wide + where.row_TK % C, E * wide)
        return RowIndex(row_TK, pair_EC.reshape(-1))

    def combine(self, back: list, weights_TK, choice: dict[str, Any], extra: dict[str, list]) -> jax.Array:
        back_ECD = back[0] if len(back) == 1 else jnp.concatenate(back, -2)
        return unpack(back_ECD.reshape(-1, back_ECD.shape[-1]), weights_TK, choice["where"])

    def table(self) -> dict[str, Verb]:
        same = lambda rows_PECD: rows_PECD  # noqa: E731
        there, back = Ends(self.parted, same), Ends(same, self.merged)
        combine = combine_verbs(self.block) if self.block.sharers > 1 else (
            exchange_verbs(self.block, "combine", back, there))
        return {
            "pack": Verb(self.pack, self.pack_gradient),
            **exchange_verbs(self.block, "dispatch", there, back), **combine,
            "expert_gather": linear(self.gathered, self.scattered),
            "expert_reduce": linear(self.scattered, self.gathered),
            "experts_up": Verb(self.up, self.up_gradient), "experts_down": Verb(self.down),
        }

    def pack(self, task: Task, reads, consts):
        n_TD, choice = reads
        slots_ECD = pack(n_TD, packed_where(choice)).reshape(self.spec.num_experts, -1, n_TD.shape[1])
        return tuple(jnp.split(slots_ECD, len(task.writes), 1))

    def pack_gradient(self, task: Task, cotangents, values, consts):
        (choice,) = values.values()
        g_ECD = jnp.concatenate(cotangents, 1)
        g_TD = sum_over_choices(g_ECD.reshape(-1, g_ECD.shape[-1]), packed_where(choice).row_TK)
        return (g_TD.astype(g_ECD.dtype),)

    def parted(self, slots_ECD):
        """[E, C, D] -> [devices, local E, C, D]; a copy for each device with a part of the expert, if fused."""
        n, copies = self.block.size(self.block.exchanges[0]), self.block.copies
        parts_PECD = slots_ECD.reshape(n // copies, -1, *slots_ECD.shape[1:])
        return parts_PECD if copies == 1 else jnp.repeat(parts_PECD, copies, 0)

    def merged(self, back_PECD):
        """[devices, local E, C, D] -> [E, C, D]; the sum over copies, if fused."""
        copies = self.block.copies
        if copies > 1:
            back_PECD = back_PECD.reshape(-1, copies, *back_PECD.shape[1:]).sum(1)
        return back_PECD.reshape(-1, *back_PECD.shape[-2:])

    def gathered(self, rows):
        """Rows of all devices that hold a part of the same experts, in a new leading dim."""
        return all_gather(rows[None], self.spec.roles.expert_shard)

    def scattered(self, rows):
        return reduce_scatter(rows, self.spec.roles.expert_shard)[0]

    def _rows(self, values: dict[str, list]):
        """What reaches the experts: "rows", or "slots" where nothing is exchanged."""
        return (values.get("rows") or values["slots"])[0]

    def up(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        rows = self._rows(values)
        return (experts_up(rows.reshape(-1, *rows.shape[-3:]), expert_weights(values)),)

    def up_gradient(self, task: Task, cotangents, values, consts):
        """Of the rows: their values are not needed. Of the weights: as JAX has it."""
        if task.direction != "input_grad":
            return NotImplemented
        (g_EGCF,) = cotangents
        g_GECD = experts_up_gradient(g_EGCF, expert_weights(by_family(tuple(values), tuple(values.values()))))
        return (g_GECD.reshape(*self._lead(), *g_GECD.shape[-3:]),)

    def _lead(self) -> tuple[int, ...]:
        """Leading dims of rows, by what has been exchanged."""
        p, q = (self.block.size(axes) for axes in self.block.exchanges)
        return (*((q,) if q > 1 else ()), *((p,) if p > 1 else ()))

    def down(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        out_GECD = experts_down(values["hidden"][0], expert_weights(values), self.spec.activation)
        return (out_GECD.reshape(*self._lead(), *out_GECD.shape[-3:]),)


def packed_where(choice: dict[str, Any]) -> RowIndex:
    """Where pairs lie in what this device packs."""
    return choice.get("packed", choice["where"])
