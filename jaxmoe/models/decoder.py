"""A decoder language model with MoE feed-forward layers."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..attention import causal_attention, rope
from ..dispatch import Ragged, Slots
from ..layer import MoE
from ..mesh import axes_size, roles_of
from ..parameters import normal, ones
from ..routing import TopK
from ..types import Aux

DISPATCH = {"slots": Slots, "ragged": Ragged}
REMAT = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, in at least float32."""

    def __init__(self, width: int, eps: float, mesh: Mesh | None):
        self.scale, self.eps = ones((width,), mesh), eps

    def __call__(self, x):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + self.eps)
        return (wide * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; heads are split over the `model` axes."""

    def __init__(self, cfg, mesh, roles, rngs):
        m, self.roles, self.mesh = cfg.model, roles, mesh
        self.heads, self.kv_heads, self.theta = m.heads, m.kv_heads, m.rope_theta
        self.width = m.d_model // m.heads
        scale = m.d_model**-0.5
        columns, rows = P(roles.fsdp, roles.model), P(roles.model, roles.fsdp)
        self.w_q = normal(rngs, (m.d_model, m.heads * self.width), scale, mesh, columns)
        self.w_k = normal(rngs, (m.d_model, m.kv_heads * self.width), scale, mesh, columns)
        self.w_v = normal(rngs, (m.d_model, m.kv_heads * self.width), scale, mesh, columns)
        self.w_o = normal(rngs, (m.heads * self.width, m.d_model), scale / (2 * m.layers) ** 0.5, mesh, rows)
        self.q_norm = RMSNorm(self.width, m.norm_eps, mesh) if m.qk_norm else None
        self.k_norm = RMSNorm(self.width, m.norm_eps, mesh) if m.qk_norm else None

    def __call__(self, x_BSD, token_mask):
        B, S, _ = x_BSD.shape

        def project(w, heads):
            y = (x_BSD @ w[...].astype(x_BSD.dtype)).reshape(B, S, heads, self.width)
            return constrain(y, self.mesh, P(self.roles.batch_axes, None, self.roles.model))

        q, k, v = project(self.w_q, self.heads), project(self.w_k, self.kv_heads), project(self.w_v, self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = causal_attention(rope(q, self.theta), rope(k, self.theta), v, token_mask)
        return out.reshape(B, S, -1) @ self.w_o[...].astype(x_BSD.dtype)


class DenseFFN(nnx.Module):
    """SwiGLU feed-forward layer, hidden width split over the `model` axes."""

    def __init__(self, cfg, mesh, roles, rngs):
        m = cfg.model
        columns, rows = P(roles.fsdp, roles.model), P(roles.model, roles.fsdp)
        self.w_gate = normal(rngs, (m.d_model, m.d_ff), m.d_model**-0.5, mesh, columns)
        self.w_up = normal(rngs, (m.d_model, m.d_ff), m.d_model**-0.5, mesh, columns)
        self.w_down = normal(rngs, (m.d_ff, m.d_model), m.d_ff**-0.5, mesh, rows)

    def __call__(self, x, token_mask=None):
        gate, up, down = (w[...].astype(x.dtype) for w in (self.w_gate, self.w_up, self.w_down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down, None


class Block(nnx.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, cfg, mesh, roles, rngs, layer: int):
        m, e = cfg.model, cfg.moe
        self.mesh, self.tokens = mesh, P(roles.batch_axes, roles.sequence_axes)
        self.attention_norm, self.ffn_norm = (RMSNorm(m.d_model, m.norm_eps, mesh) for _ in range(2))
        self.attention = Attention(cfg, mesh, roles, rngs)
        if (layer + 1) % m.moe_every:
            self.ffn = DenseFFN(cfg, mesh, roles, rngs)
        else:
            layout = DISPATCH[e.dispatch.kind](**e.dispatch.model_dump(exclude={"kind"}))
            router = TopK(e.router.k, e.router.score, e.router.normalize, e.router.scale)
            self.ffn = MoE(
                m.d_model, e.d_ff, e.num_experts, router=router, dispatch=layout,
                activation=e.activation, shared_experts=e.shared_experts, mesh=mesh, roles=roles, group=e.group,
                dtype=compute_dtype(cfg), rngs=rngs,
            )

    def __call__(self, x_BSD, token_mask):
        x_BSD = constrain(x_BSD + self.attention(self.attention_norm(x_BSD), token_mask), self.mesh, self.tokens)
        y_BSD, aux = self.ffn(self.ffn_norm(x_BSD), token_mask)
        return constrain(x_BSD + y_BSD, self.mesh, self.tokens), aux


class DecoderLM(nnx.Module):
    """Decoder language model: logits_BSV, aux = model(tokens_BS). aux is averaged over the MoE layers."""

    def __init__(self, cfg, mesh: Mesh | None, rngs: nnx.Rngs):
        m, roles = cfg.model, roles_of(cfg)
        for key, size in (("model.d_model", m.d_model), ("model.d_ff", m.d_ff), ("model.vocab", m.vocab)):
            if size % axes_size(mesh, roles.fsdp):
                raise ValueError(f"{key} must be divisible by the {axes_size(mesh, roles.fsdp)} devices of "
                                 f"parallel.fsdp, got {size}")
        self.mesh, self.roles, self.dtype = mesh, roles, compute_dtype(cfg)
        self.remat = cfg.train.remat
        self.embedding = normal(rngs, (m.vocab, m.d_model), m.d_model**-0.5, mesh, P(roles.fsdp))
        self.head = None if m.tied else normal(rngs, (m.vocab, m.d_model), m.d_model**-0.5, mesh, P(roles.fsdp))
        self.blocks = nnx.List([Block(cfg, mesh, roles, rngs, i) for i in range(m.layers)])
        self.norm = RMSNorm(m.d_model, m.norm_eps, mesh)

    def __call__(self, tokens_BS, token_mask=None) -> tuple[jax.Array, Aux]:
        """tokens_BS: int, any batch and sequence size. token_mask: bool, False = padding."""
        B, S = tokens_BS.shape
        extra = (-B % axes_size(self.mesh, self.roles.batch_axes), -S % axes_size(self.mesh, self.roles.sequence_axes))
        if any(extra):
            token_mask = jnp.ones((B, S), bool) if token_mask is None else token_mask
            tokens_BS, token_mask = (jnp.pad(a, ((0, extra[0]), (0, extra[1]))) for a in (tokens_BS, token_mask))
        width = self.embedding.shape[1]
        x_BSD = (self.embedding[...][tokens_BS] * width**0.5).astype(self.dtype)
        x_BSD = constrain(x_BSD, self.mesh, P(self.roles.batch_axes, self.roles.sequence_axes))
        every_aux = []
        for block in self.blocks:
            x_BSD, aux = _run(block, x_BSD, token_mask, self.remat)
            every_aux += [aux] if aux is not None else []
        head = self.embedding if self.head is None else self.head
        logits_BSV = self.norm(x_BSD).astype(self.dtype) @ head[...].astype(self.dtype).T
        return logits_BSV[:B, :S].astype(jnp.promote_types(self.dtype, jnp.float32)), mean(every_aux)


def _run(block: Block, x_BSD, token_mask, remat: str):
    if remat == "none":
        return block(x_BSD, token_mask)
    return nnx.remat(lambda b, x, mask: b(x, mask), policy=REMAT[remat])(block, x_BSD, token_mask)


def mean(every_aux: list[Aux]) -> Aux:
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *every_aux)


def compute_dtype(cfg):
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[cfg.train.precision]


def constrain(x, mesh: Mesh | None, spec: P):
    return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
