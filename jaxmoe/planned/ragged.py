"""Tasks of the ragged layout: chunks are windows of every bucket of rows; what fits in none follows in more rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..collectives import all_gather, all_to_all, pmax, reduce_scatter
from ..dispatch.ragged import further_rounds, inverse, one_round, sizes_in_window, sort_pairs, sort_rows, window
from ..dispatch.rows import pack, sum_over_choices, unpack
from ..experts import grouped_down, grouped_up
from ..plan.block import Block
from ..plan.execute import Verb
from ..plan.tasks import Degrees, Task
from ..spec import Spec
from ..types import Groups, Routing
from .exchange import Ends, exchange_verbs, linear
from .pieces import by_family, expert_weights


@dataclass(frozen=True)
class RaggedLayout:
    """Values: slots, rows, out, back [rows of buckets, D], by sender; hidden [rows sorted by expert, F]."""

    block: Block
    degrees: Degrees
    spec: Spec
    holds_collectives: ClassVar[bool] = True

    @property
    def chunks(self) -> int:
        return self.degrees.moe_forward if self.block.chunk == "slots" else 1

    @property
    def bucket(self) -> int:
        """Rows that go to one device in a chunk."""
        parts = 1 if self.block.chunk == "slots" else self.degrees.moe_forward
        return -(-self.block.rows // parts // self.chunks)

    @property
    def local(self) -> int:
        return self.spec.num_experts // self.block.size(self.spec.roles.expert)

    def choose(self, routing: Routing, groups: Groups) -> tuple[dict[str, Any], jax.Array]:
        send, roles = sort_pairs(routing, self.spec.num_experts, self.local), self.spec.roles
        rounds = pmax(-(-send.fill_B.max() // self.bucket), (*roles.expert, *roles.expert_shard))
        return {"send": send, "rounds": rounds}, 0 * send.fill_B[0]

    def combine(self, back: list, weights_TK, choice: dict[str, Any], extra: dict[str, list]) -> jax.Array:
        send = choice["send"]
        y_TD = unpack(back[0], weights_TK, window(send, 0, self.bucket))
        for i in range(1, self.chunks):
            y_TD = y_TD + unpack(back[i], weights_TK, window(send, i, self.bucket))
        if self.bucket * self.chunks >= send.most:
            return y_TD
        n_TD = extra["n"][0]
        w = jax.tree.map(lambda a: a.astype(n_TD.dtype), expert_weights(extra))
        run = one_round(self.bucket, self.spec.activation, self.spec.roles)
        return y_TD + further_rounds(run, self.chunks, choice["rounds"], y_TD, n_TD, weights_TK, w, send,
                                     extra["sizes"][0]["whole"])

    def table(self) -> dict[str, Verb]:
        roles = self.spec.roles
        rows = Ends(lambda a: a.reshape(-1, self.bucket, a.shape[-1]), lambda a: a.reshape(-1, a.shape[-1]))
        gather = lambda rows: all_gather(rows, roles.expert_shard)  # noqa: E731
        scatter = lambda rows: reduce_scatter(rows, roles.expert_shard)  # noqa: E731
        return {
            "pack": Verb(self.pack, self.pack_gradient), "exchange_sizes": Verb(self.sizes),
            **exchange_verbs(self.block, "dispatch", rows, rows), **exchange_verbs(self.block, "combine", rows, rows),
            "expert_gather": linear(gather, scatter), "expert_reduce": linear(scatter, gather),
            "experts_up": Verb(self.up, self.up_gradient), "experts_down": Verb(self.down),
        }

    def pack(self, task: Task, reads, consts):
        n_TD, choice = reads
        return tuple(pack(n_TD, window(choice["send"], i, self.bucket)) for i in range(self.chunks))

    def pack_gradient(self, task: Task, cotangents, values, consts):
        (choice,) = values.values()
        parts = [sum_over_choices(g_RD, window(choice["send"], i, self.bucket).row_TK)
                 for i, g_RD in enumerate(cotangents)]
        return (reduce(jnp.add, parts).astype(cotangents[0].dtype),)

    def sizes(self, task: Task, reads, consts):
        """Rows of each local expert from each sender; for each chunk how many, and how they are sorted by expert."""
        send, roles = reads[0]["send"], self.spec.roles
        whole_PE = all_gather(all_to_all(send.sizes_E, roles.expert).reshape(-1, self.local), roles.expert_shard)
        chunks = []
        for i in range(self.chunks):
            sizes_PE = sizes_in_window(whole_PE, i, self.bucket)
            chunks.append((sizes_PE.sum(0), sort_rows(sizes_PE, self.bucket)))
        return ({"whole": whole_PE, "chunks": tuple(chunks)},)

    def _chunk(self, task: Task, values: dict[str, list]):
        return values["sizes"][0]["chunks"][task.chunk if self.block.chunk == "slots" else 0]

    def up(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        sizes_E, sort = self._chunk(task, values)
        rows_RD = (values.get("rows") or values["slots"])[0]
        return (grouped_up(pack(rows_RD, sort), sizes_E, expert_weights(values)),)

    def up_gradient(self, task: Task, cotangents, values, consts):
        """Of the rows: their values are not needed, so their place is taken by zeros. Of the weights: as JAX has it."""
        if task.direction != "input_grad":
            return NotImplemented
        (g_RF,) = cotangents
        named = by_family(tuple(values), tuple(values.values()))
        w = expert_weights(named)
        sizes_E, sort = self._chunk(task, named)
        x_RD = 0 * (g_RF[0] @ w.up_EDF[0].T.astype(g_RF[0].dtype))
        _, pullback = jax.vjp(lambda x: grouped_up(pack(x, sort), sizes_E, w), x_RD)
        return pullback(g_RF)

    def down(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        sizes_E, sort = self._chunk(task, values)
        out_RD = grouped_down(values["hidden"][0], sizes_E, expert_weights(values), self.spec.activation)
        return (pack(out_RD, inverse(sort)),)
