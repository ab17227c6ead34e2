"""Tasks of attention: projections, scores over the keys seen so far, and the way back to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..attention import attend, rope
from ..collectives import all_gather, reduce_scatter
from ..norm import rms_norm
from ..plan.block import Block
from ..plan.execute import Verb
from ..plan.tasks import Degrees, Task
from .pieces import by_family, part_of, piece, piece_gradient


@dataclass(frozen=True)
class AttentionVerbs:
    """Heads are split over the `model` axes, and so is the sequence between tasks.

    Consts: "positions" [B, S] and, for packed documents or padding, "documents" [B, S], of the whole sequence.
    """

    block: Block
    degrees: Degrees
    rope_theta: float
    norm_eps: float
    backend: str = "auto"

    def table(self) -> dict[str, Verb]:
        return {
            "model_gather": Verb(self.gather, self.gather_gradient),
            "model_scatter": Verb(self.scatter, self.scatter_gradient),
            "attn_in": Verb(self.project), "attend": Verb(self.attend), "attn_out": Verb(self.out),
        }

    @property
    def parts(self) -> int:
        return self.block.token_parts(self.degrees)

    @property
    def dense(self) -> int:
        return self.degrees.dense_forward

    @property
    def model(self) -> tuple[str, ...]:
        return self.block.role("model")

    def stream(self, task: Task, values: dict[str, list]) -> jax.Array:
        """This task's piece of the residual stream."""
        return piece(values["x"], part_of(task), self.dense, self.parts, self.block.token_dim)

    def stream_gradient(self, task: Task, g: jax.Array) -> list[jax.Array]:
        return piece_gradient(g, part_of(task), self.dense, self.parts, self.block.token_dim)

    def gather(self, task: Task, reads, consts):
        return (all_gather(self.stream(task, by_family(task.reads, reads)), self.model, 1),)

    def gather_gradient(self, task: Task, cotangents, values, consts):
        return tuple(self.stream_gradient(task, reduce_scatter(cotangents[0], self.model, 1)))

    def scatter(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        return (self.stream(task, values) + reduce_scatter(values["u"][0], self.model, 1),)

    def scatter_gradient(self, task: Task, cotangents, values, consts):
        (g_BSD,) = cotangents
        found = {"u": iter([all_gather(g_BSD, self.model, 1)]), "x": iter(self.stream_gradient(task, g_BSD))}
        return tuple(next(found[v.removeprefix("d:")[0]]) for v in task.writes)

    def project(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        x_BSD = values["xg"][0] if "xg" in values else self.stream(task, values)
        x_BSD = rms_norm(x_BSD, values["attention_norm"][0], self.norm_eps)
        positions_BS = piece([consts["positions"]], part_of(task), self.dense, 1, self.block.token_dim)

        def heads(name):
            y = x_BSD @ values[name][0].astype(x_BSD.dtype)
            return y.reshape(*x_BSD.shape[:2], -1, self.block.head_dim)

        q, k, v = heads("w_q"), heads("w_k"), heads("w_v")
        if "q_norm" in values:
            q = rms_norm(q, values["q_norm"][0], self.norm_eps)
            k = rms_norm(k, values["k_norm"][0], self.norm_eps)
        return rope(q, positions_BS, self.rope_theta), rope(k, positions_BS, self.rope_theta), v

    def attend(self, task: Task, reads, consts):
        """Chunk i of the sequence reads keys of chunks up to i; of the batch, its own."""
        values, i = by_family(task.reads, reads), part_of(task)
        k, v = (values[n][0] if len(values[n]) == 1 else jnp.concatenate(values[n], 1) for n in ("k", "v"))
        q = values["q"][0]
        mask_BSL = self.mask(q.shape[1], k.shape[1], i, consts.get("documents"))
        return (attend(q, k, v, mask_BSL, causal=q.shape[1] == k.shape[1], backend=self.backend),)

    def mask(self, queries: int, keys: int, i: int, documents_BS) -> jax.Array | None:
        mask = None
        if documents_BS is not None:
            of_queries = piece([documents_BS], i, self.dense, 1, self.block.token_dim)
            of_keys = documents_BS[:, :keys] if self.block.chunk == "sequence" else of_queries
            mask = of_queries[:, :, None] == of_keys[:, None, :]
        if queries < keys:   # causality with the queries at the end
            causal = jnp.arange(keys) <= jnp.arange(keys - queries, keys)[:, None]
            mask = jnp.broadcast_to(causal, (1, queries, keys)) if mask is None else mask & causal
        return mask

    def out(self, task: Task, reads, consts):
        values = by_family(task.reads, reads)
        o = values["o"][0]
        y_BSD = o.reshape(*o.shape[:2], -1) @ values["w_o"][0].astype(o.dtype)
        return (self.stream(task, values) + y_BSD if "x" in values else y_BSD,)
