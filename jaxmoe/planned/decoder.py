"""The stack of a decoder's blocks run as a plan says, inside one shard_map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..mesh import axes_size
from ..plan.block import Block
from ..plan.execute import Counts, no_counts, stack
from ..plan.plan import Plan
from ..spec import Spec
from ..types import Aux
from .attention import AttentionVerbs
from .blocks import attention_block, moe_block
from .exchange import metrics_of
from .layer import moe_verbs
from .shared_slots import with_group

NAMES = {("attention_norm", "scale"): "attention_norm", ("ffn_norm", "scale"): "ffn_norm",
         ("attention", "q_norm", "scale"): "q_norm", ("attention", "k_norm", "scale"): "k_norm"}


def stack_parameters(block: nnx.Module) -> dict[str, nnx.Variable]:
    """Parameters of a scanned block by the names that plans use, each [layers, ...]."""
    return {_name(path): v for path, v in nnx.to_flat_state(nnx.state(block, nnx.Param))}


def _name(path: tuple) -> str:
    if path in NAMES:
        return NAMES[path]
    _, *rest = path
    return "_".join(rest)   # ("ffn", "router", "w_DE") -> "router_w_DE"


def decoder_block(cfg: Any, spec: Spec, shapes: dict[str, tuple[int, ...]], specs: dict[str, P], batch: int,
                  links: dict[str, str] | None = None) -> Block:
    """What plans of a decoder are made of. shapes, specs: of one layer's parameters; batch: global."""
    m = cfg.model
    block = moe_block(spec, batch, m.seq, chunk=cfg.schedule.chunk, shared_experts=cfg.moe.shared_experts, links=links,
                      shapes=shapes, specs=specs, hierarchical=cfg.schedule.hierarchical)
    return attention_block(block, m.layers, cfg.schedule.segment, m.heads, m.kv_heads, m.d_model // m.heads)


def planned_stack(
    plan: Plan, spec: Spec, attention: Any, block: nnx.Module, mesh: Mesh | None, x_BSD: jax.Array, positions_BS,
    documents_BS, token_mask, segment_ids, keys_L, sink: Counts | None = None,
) -> tuple[jax.Array, Aux]:
    """x_BSD and aux with a leading dim over layers. attention: rope_theta, norm_eps, backend; see `AttentionVerbs`.

    Metrics of a codec have a leading dim over segments. sink: `no_counts`; its gradient is those
    of the backward pass.
    """
    B, S, _ = x_BSD.shape
    roles = spec.roles
    variables = stack_parameters(block)
    params = {n: v[...] for n, v in variables.items()}
    bias = block.ffn.bias   # type: ignore[attr-defined]
    layered = {n: a for n, a in (("bias", None if bias is None else bias[...]), ("key", keys_L)) if a is not None}
    tokens = {
        "mask": jnp.ones((B, S), bool) if token_mask is None else token_mask.astype(bool),
        "index": jnp.arange(B * S).reshape(B, S),
        "segment": jnp.zeros((B, S), jnp.int32) if segment_ids is None else segment_ids,
    }
    sequences = {"positions": positions_BS} | ({} if documents_BS is None else {"documents": documents_BS})
    groups = spec.groups(B, S)
    verbs = moe_verbs(plan, spec, groups, attention.norm_eps)
    verbs = verbs | replace(attention, block=plan.block, degrees=plan.degrees).table()
    run = stack(plan, verbs, spec.in_turn)

    def local(x_BSD, params, tokens, sequences, layered, sink):
        x_BSD, aux, counted = run(x_BSD, params, with_group(tokens | sequences, plan.block), layered, sink)
        return x_BSD, aux._replace(metrics=aux.metrics | metrics_of(counted))

    sink = sink or no_counts(plan.block)
    if mesh is None:
        return local(x_BSD, params, tokens, sequences, layered, sink)
    by_token, by_sequence = P(roles.batch_axes, roles.sequence_axes), P(roles.batch_axes)
    in_specs = (by_token, {n: v.get_metadata("spec", P()) for n, v in variables.items()},
                dict.fromkeys(tokens, by_token), dict.fromkeys(sequences, by_sequence),
                *jax.tree.map(lambda _: P(), (layered, sink)))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=(by_token, P()), check_vma=True)
    chunks = plan.degrees.dense_forward if plan.block.chunk == "sequence" else 1
    shards = axes_size(mesh, roles.sequence_axes)
    x_BSD, tokens = jax.tree.map(lambda a: dealt(a, chunks, shards), (x_BSD, tokens))
    y_BSD, aux = mapped(x_BSD, params, tokens, sequences, layered, sink)
    return dealt(y_BSD, shards, chunks), aux


def dealt(a_BS: jax.Array, chunks: int, shards: int) -> jax.Array:
    """Positions [B, S, ...] in the order in which each of equal shards holds its part of each of equal chunks.

    A sequence that is split over devices can then be gathered chunk by chunk. `dealt(a, shards, chunks)` undoes it.
    """
    if chunks == 1 or shards == 1:
        return a_BS
    B, S, *rest = a_BS.shape
    return a_BS.reshape(B, chunks, shards, -1, *rest).swapaxes(1, 2).reshape(B, S, *rest)


__all__ = ["AttentionVerbs", "decoder_block", "planned_stack", "stack_parameters"]
