"""A decoder language model with MoE feed-forward layers."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..attention import attend, rope
from ..dispatch import DISPATCHES
from ..layer import MoE
from ..mesh import Roles, axes_size, roles_of
from ..norm import rms_norm
from ..parameters import normal, ones
from ..plan.plan import Plan
from ..planned.attention import AttentionVerbs
from ..planned.decoder import planned_stack
from ..planned.exchange import CODEC_METRICS
from ..routing import ROUTERS
from ..spec import Spec
from ..types import Aux
from .cache import KV, Cache, constrain, empty, kv_spec, written
from .stack import scanned, stacked, unrolled, unstacked


class Context(NamedTuple):
    """What blocks know of their tokens.

    positions_BS: rotary positions. mask_BSL: keys that each query may see; None = all that causality allows.
    token_mask, segment_ids: [B, S] or None, as the model got them. start: () int32, position of the first token in the
    cache; 0 without one.
    """

    positions_BS: jax.Array
    mask_BSL: jax.Array | None = None
    token_mask: jax.Array | None = None
    segment_ids: jax.Array | None = None
    start: jax.Array | int = 0


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, in at least float32."""

    def __init__(self, width: int, eps: float, mesh: Mesh | None):
        self.scale, self.eps = ones((width,), mesh), eps

    def __call__(self, x):
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; heads are split over the `model` axes."""

    def __init__(self, cfg, mesh, roles, rngs):
        m, self.roles, self.mesh = cfg.model, roles, mesh
        self.heads, self.kv_heads, self.theta, self.backend = m.heads, m.kv_heads, m.rope_theta, m.attention
        self.width = m.d_model // m.heads
        scale = m.d_model**-0.5
        columns, rows = P(roles.fsdp, roles.model), P(roles.model, roles.fsdp)
        self.w_q = normal(rngs, (m.d_model, m.heads * self.width), scale, mesh, columns)
        self.w_k = normal(rngs, (m.d_model, m.kv_heads * self.width), scale, mesh, columns)
        self.w_v = normal(rngs, (m.d_model, m.kv_heads * self.width), scale, mesh, columns)
        self.w_o = normal(rngs, (m.heads * self.width, m.d_model), scale / (2 * m.layers) ** 0.5, mesh, rows)
        self.q_norm = RMSNorm(self.width, m.norm_eps, mesh) if m.qk_norm else None
        self.k_norm = RMSNorm(self.width, m.norm_eps, mesh) if m.qk_norm else None

    def __call__(self, x_BSD, context: Context, kv: KV | None = None):
        """y_BSD, and kv with these tokens' keys and values written at `context.start`; None stays None."""
        q, k, v = self._project(x_BSD, context.positions_BS)
        if kv is not None:
            kv = KV(written(kv.k, k, context.start), written(kv.v, v, context.start))
            k, v = kv = jax.tree.map(lambda a: constrain(a, self.mesh, kv_spec(self.roles)), kv)
        out = attend(q, k, v, context.mask_BSL, causal=kv is None, backend=self.backend)
        return out.reshape(*x_BSD.shape[:2], -1) @ self.w_o[...].astype(x_BSD.dtype), kv

    def _project(self, x_BSD, positions_BS):
        def heads(w, count):
            y = (x_BSD @ w[...].astype(x_BSD.dtype)).reshape(*x_BSD.shape[:2], count, self.width)
            return constrain(y, self.mesh, kv_spec(self.roles))

        q, k, v = heads(self.w_q, self.heads), heads(self.w_k, self.kv_heads), heads(self.w_v, self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rope(q, positions_BS, self.theta), rope(k, positions_BS, self.theta), v


class DenseFFN(nnx.Module):
    """SwiGLU feed-forward layer, hidden width split over the `model` axes."""

    def __init__(self, cfg, mesh, roles, rngs):
        m = cfg.model
        columns, rows = P(roles.fsdp, roles.model), P(roles.model, roles.fsdp)
        self.w_gate = normal(rngs, (m.d_model, m.d_ff), m.d_model**-0.5, mesh, columns)
        self.w_up = normal(rngs, (m.d_model, m.d_ff), m.d_model**-0.5, mesh, columns)
        self.w_down = normal(rngs, (m.d_ff, m.d_model), m.d_ff**-0.5, mesh, rows)

    def __call__(self, x, token_mask=None, segment_ids=None, key=None):
        gate, up, down = (w[...].astype(x.dtype) for w in (self.w_gate, self.w_up, self.w_down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down, None


def spec_of(cfg, mesh, dtype=None) -> Spec:
    """What `[moe]` says of the MoE layers."""
    e = cfg.moe
    return Spec(
        cfg.model.d_model, e.d_ff, e.num_experts, ROUTERS[e.router.kind](**e.router.model_dump(exclude={"kind"})),
        DISPATCHES[e.dispatch.kind](**e.dispatch.model_dump(exclude={"kind"})), e.activation, mesh,
        roles_of(cfg) if mesh is not None else Roles(), e.group, e.load_balance,
        jnp.dtype(compute_dtype(cfg) if dtype is None else dtype),
    )


def moe_of(cfg, mesh, rngs, dtype) -> MoE:
    """The MoE layer that `[moe]` describes."""
    s = spec_of(cfg, mesh, dtype)
    return MoE(s.d_model, s.d_ff, s.num_experts, rngs=rngs, router=s.router, dispatch=s.dispatch,
               activation=s.activation, shared_experts=cfg.moe.shared_experts, mesh=mesh, roles=s.roles, group=s.group,
               load_balance=s.load_balance, dtype=s.dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, cfg, mesh, roles, rngs, layer: int, dtype):
        m = cfg.model
        self.mesh, self.tokens = mesh, P(roles.batch_axes, roles.sequence_axes)
        self.attention_norm, self.ffn_norm = (RMSNorm(m.d_model, m.norm_eps, mesh) for _ in range(2))
        self.attention = Attention(cfg, mesh, roles, rngs)
        dense = (layer + 1) % m.moe_every
        self.ffn = DenseFFN(cfg, mesh, roles, rngs) if dense else moe_of(cfg, mesh, rngs, dtype)

    def __call__(self, x_BSD, context: Context, kv: KV | None = None, key=None):
        """x_BSD, aux of the MoE layer or None, kv."""
        y_BSD, kv = self.attention(self.attention_norm(x_BSD), context, kv)
        x_BSD = constrain(x_BSD + y_BSD, self.mesh, self.tokens)
        y_BSD, aux = self.ffn(
            self.ffn_norm(x_BSD), token_mask=context.token_mask, segment_ids=context.segment_ids, key=key
        )
        return constrain(x_BSD + y_BSD, self.mesh, self.tokens), aux, kv


class DecoderLM(nnx.Module):
    """Decoder language model: logits_BSV, aux = model(tokens_BS).

    aux is of all MoE layers: losses and dropped_fraction are means, tokens_per_expert is [MoE layers, E]; of metrics,
    max_over_mean_load is the largest, dead_experts the sum, others are means. A model without MoE layers
    (model.moe_every > model.layers) has zeros there.

    Example: ``model = DecoderLM(load_config("configs/quickstart.toml"), None, nnx.Rngs(0)); out = model(tokens_BS)``

    cfg.model.scan: layers run as a scan over stacked parameters; the same numbers, and a compile time that does not
    grow with the layers. dtype: compute type, by default of train.precision.

    plan: if set, batches of the shape that it was made for run as it says; others, and decoding, run without a plan.
    """

    plan: Plan | None = None

    def __init__(self, cfg, mesh: Mesh | None, rngs: nnx.Rngs, dtype: Any = None):
        m, roles = cfg.model, roles_of(cfg)
        _check_sizes(m, axes_size(mesh, roles.fsdp))
        self.mesh, self.roles, self.remat = mesh, roles, cfg.train.remat
        self.dtype = jnp.dtype(compute_dtype(cfg) if dtype is None else dtype)
        self.layers, self.num_experts, self.kv_shape = m.layers, cfg.moe.num_experts, (m.kv_heads, m.d_model // m.heads)
        self.embedding = normal(rngs, (m.vocab, m.d_model), m.d_model**-0.5, mesh, P(roles.fsdp))
        self.head = None if m.tied else normal(rngs, (m.vocab, m.d_model), m.d_model**-0.5, mesh, P(roles.fsdp))
        layers = [Block(cfg, mesh, roles, rngs, i, self.dtype) for i in range(m.layers)]
        self.group = m.layers if not m.scan else m.moe_every if m.moe_every <= m.layers else 1
        self.scan = m.scan
        self.blocks = self.as_stack(layers)
        self.norm = RMSNorm(m.d_model, m.norm_eps, mesh)

    def __call__(self, tokens_BS, token_mask=None, segment_ids=None, key=None, sink=None) -> tuple[jax.Array, Aux]:
        """tokens_BS: int, any batch and sequence size. token_mask: bool, False = padding: nothing depends on it.

        segment_ids: int, documents of packed sequences, each one piece of a row: attention stays inside, and rotary
        positions start anew. key: for routers with noise; None = no noise. sink: `no_counts` of the
        plan's block; its gradient is the counters of coded collectives in the backward pass.
        """
        B, S = tokens_BS.shape
        tokens_BS, token_mask, segment_ids = self._padded(tokens_BS, token_mask, segment_ids)
        documents_BS = _documents(token_mask, segment_ids)
        mask_BSL = None if documents_BS is None else documents_BS[:, :, None] == documents_BS[:, None, :]
        context = Context(_positions(segment_ids, tokens_BS.shape), mask_BSL, token_mask, segment_ids)
        x_BSD = self._embed(tokens_BS)
        if self.plan is not None and self._is_planned(tokens_BS.shape):
            x_BSD, aux_L = self._run_planned(self.plan, x_BSD, context, documents_BS, key, sink)
        else:
            x_BSD, aux_L, _ = self._run(x_BSD, context, (None,) * len(self.blocks), key)
        return self._logits(x_BSD)[:B, :S], no_aux(self.num_experts) if aux_L is None else of_layers(aux_L)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens of `batch` sequences, split over batch and model axes where possible."""
        groups = (self.layers // self.group,) if self.scan else ()
        shape = (*groups, batch, length, *self.kv_shape)
        return empty(self.mesh, self.roles, len(self.blocks), shape, self.dtype)

    def decode(self, cache: Cache, tokens_BS, token_mask=None) -> tuple[jax.Array, Cache]:
        """Logits [B, S, V] of the next S tokens, and the cache with them; one compilation for each S.

        token_mask: bool, False = padding (prompts of unequal length are padded at the left). With slots, a capacity
        group is then one sequence's S tokens, whatever moe.group: what is dropped can differ from the full forward.
        With Ragged nothing is dropped, and logits are the full forward's. Beyond the cache's length they are NaN.
        """
        if tokens_BS.shape[1] > cache.valid_BL.shape[1]:
            raise ValueError(f"the cache must be as long as the tokens, {tokens_BS.shape[1]}; "
                             f"init_cache got length={cache.valid_BL.shape[1]}")
        graph, state = nnx.split(self)
        return _decode(graph, state, cache, tokens_BS, token_mask)

    def extend(self, cache: Cache, tokens_BS, token_mask) -> tuple[jax.Array, Cache]:
        """`decode`, not compiled. token_mask: None = all tokens are there."""
        (B, S), L, start = tokens_BS.shape, cache.valid_BL.shape[1], cache.used
        new_BS = jnp.ones((B, S), bool) if token_mask is None else token_mask
        valid_BL = constrain(written(cache.valid_BL, new_BS, start), self.mesh, P(self.roles.batch_axes))
        positions_S = start + jnp.arange(S)
        mask_BSL = valid_BL[:, None, :] & (jnp.arange(L) <= positions_S[:, None])
        context = Context(jnp.broadcast_to(positions_S, (B, S)), mask_BSL, token_mask, None, start)
        x_BSD, _, blocks = self._run(self._embed(tokens_BS), context, cache.blocks, None)
        logits_BSV = jnp.where(start + S > L, jnp.nan, self._logits(x_BSD))
        return logits_BSV, Cache(blocks, valid_BL, constrain(start + S, self.mesh, P()))

    def update_router_bias(self, tokens_per_expert_LE: jax.Array) -> None:
        """Move the balancing biases, once an optimizer step. tokens_per_expert_LE: of the step's global batch."""
        moes = [block.ffn for block in self.blocks if isinstance(block.ffn, MoE) and block.ffn.bias is not None]
        tokens = tokens_per_expert_LE.reshape(-1, max(len(moes), 1), self.num_experts)
        for i, moe in enumerate(moes):
            update = nnx.vmap(MoE.update_bias) if self.scan else MoE.update_bias
            update(moe, tokens[:, i] if self.scan else tokens[0, i])

    def as_layers(self) -> list[Block]:
        """One block a layer, however they are stored."""
        return unstacked(self.blocks) if self.scan else list(self.blocks)

    def as_stack(self, layers: list[Block]) -> nnx.List:
        """Layers as `blocks` stores them."""
        return stacked(layers, self.group, self.mesh) if self.scan else nnx.List(layers)

    def _run(self, x_BSD, context: Context, cache, key):
        keys = (None,) * len(self.blocks)
        if key is not None:
            keys_NL = jax.random.split(key, (self.layers // self.group, self.group))
            keys = tuple(keys_NL.T) if self.scan else tuple(keys_NL[0])
        run = scanned if self.scan else unrolled
        return run(self.blocks, self.remat, x_BSD, context, cache, keys)

    def _is_planned(self, shape: tuple[int, int]) -> bool:
        """Whether a global batch of this shape is the plan's."""
        assert self.plan is not None
        shards = axes_size(self.mesh, self.roles.batch_axes), axes_size(self.mesh, self.roles.sequence_axes)
        return (self.plan.block.batch * shards[0], self.plan.block.seq * shards[1]) == shape

    def _run_planned(self, plan: Plan, x_BSD, context: Context, documents_BS, key, sink):
        block = self.blocks[0]
        keys_L = None if key is None else jax.random.split(key, self.layers)
        attention = AttentionVerbs(plan.block, plan.degrees, block.attention.theta, block.ffn_norm.eps,
                                   block.attention.backend)
        x_BSD, aux_L = planned_stack(plan, block.ffn.spec, attention, block, self.mesh, x_BSD, context.positions_BS,
                                     documents_BS, context.token_mask, context.segment_ids, keys_L, sink)
        return constrain(x_BSD, self.mesh, P(self.roles.batch_axes, self.roles.sequence_axes)), aux_L

    def _padded(self, tokens_BS, token_mask, segment_ids) -> tuple[Any, Any, Any]:
        """The batch with padding up to multiples of the mesh."""
        B, S = tokens_BS.shape
        extra = (-B % axes_size(self.mesh, self.roles.batch_axes), -S % axes_size(self.mesh, self.roles.sequence_axes))
        if not any(extra):
            return tokens_BS, token_mask, segment_ids
        token_mask = jnp.ones((B, S), bool) if token_mask is None else token_mask
        pad = lambda a: None if a is None else jnp.pad(a, ((0, extra[0]), (0, extra[1])))  # noqa: E731
        return pad(tokens_BS), pad(token_mask), pad(segment_ids)

    def _embed(self, tokens_BS):
        x_BSD = (self.embedding[...][tokens_BS] * self.embedding.shape[1] ** 0.5).astype(self.dtype)
        return constrain(x_BSD, self.mesh, P(self.roles.batch_axes, self.roles.sequence_axes))

    def _logits(self, x_BSD):
        head = self.embedding if self.head is None else self.head
        logits_BSV = self.norm(x_BSD).astype(self.dtype) @ head[...].astype(self.dtype).T
        return logits_BSV.astype(jnp.promote_types(self.dtype, jnp.float32))


@partial(jax.jit, static_argnums=0)
def _decode(graph, state, cache: Cache, tokens_BS, token_mask):
    model = nnx.merge(graph, state)
    for block in model.blocks:
        if isinstance(block.ffn, MoE):
            block.ffn.spec = replace(block.ffn.spec, group="sequence")
    return model.extend(cache, tokens_BS, token_mask)


def _check_sizes(m, shards: int) -> None:
    for key, size in (("model.d_model", m.d_model), ("model.d_ff", m.d_ff), ("model.vocab", m.vocab)):
        if size % shards:
            raise ValueError(f"{key} must be divisible by the {shards} devices of parallel.fsdp, got {size}")
    if m.scan and m.moe_every <= m.layers and m.layers % m.moe_every:
        raise ValueError(f"model.layers must be a multiple of model.moe_every={m.moe_every} for model.scan=true, "
                         f"got {m.layers}")


def _positions(segment_ids: Any, shape: tuple[int, ...]) -> jax.Array:
    """Positions [B, S] that start at 0 in every document."""
    index_BS = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if segment_ids is None:
        return index_BS
    begins_BS = jnp.concatenate([jnp.ones((shape[0], 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], 1)
    return index_BS - jax.lax.cummax(jnp.where(begins_BS, index_BS, 0), axis=1)


def _documents(token_mask, segment_ids):
    """Which document a token is in [B, S], or None if all is one; padding is a document of its own."""
    if token_mask is None or segment_ids is None:
        return segment_ids if token_mask is None else token_mask
    return jnp.where(token_mask, segment_ids, jnp.iinfo(segment_ids.dtype).min)


def no_aux(num_experts: int) -> Aux:
    """Aux of a model without MoE layers."""
    zero = jnp.zeros(())
    return Aux(dict.fromkeys(("load_balance", "router_z", "importance"), zero), jnp.zeros((0, num_experts)), zero, {})


# Of metrics over layers; others are averaged.
OVER_LAYERS = {"max_over_mean_load": jnp.max, "dead_experts": jnp.sum, **CODEC_METRICS}


def of_layers(aux_L: Aux) -> Aux:
    """Aux of a model, from that of its MoE layers, which has a leading dim over them."""
    losses = {name: a.mean(0) for name, a in aux_L.losses.items()}
    metrics = {name: OVER_LAYERS.get(name, jnp.mean)(a, axis=0) for name, a in aux_L.metrics.items()}
    return Aux(losses, aux_L.tokens_per_expert, aux_L.dropped_fraction.mean(0), metrics)


def compute_dtype(cfg):
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[cfg.train.precision]
