"""An MoE model from a trained dense one. (Sparse upcycling, arXiv:2212.05055)"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ..layer import MoE
from .decoder import Block, DecoderLM, DenseFFN


def dense_config(cfg):
    """cfg with a dense feed-forward layer in every block."""
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={"moe_every": cfg.model.layers + 1})})


def upcycle(dense: DecoderLM, cfg, mesh: Mesh | None, rngs: nnx.Rngs) -> DecoderLM:
    """A model of cfg whose experts are copies of `dense`'s feed-forward layers; routers are new.

    With combine weights that sum to 1 (moe.router.normalize, scale 1) and nothing dropped, it computes what `dense`
    does. cfg must have experts of the dense layers' width (moe.d_ff), activation "swiglu" and no shared experts.

    Example: ``moe = upcycle(dense, cfg, mesh, nnx.Rngs(0))``
    """
    if cfg.moe.activation != "swiglu" or cfg.moe.shared_experts:
        raise ValueError('moe.activation must be "swiglu" and moe.shared_experts 0 to upcycle a dense model, '
                         f"got {cfg.moe.activation!r} and {cfg.moe.shared_experts}")
    model = DecoderLM(cfg, mesh, rngs)
    layers, sources = model.as_layers(), dense.as_layers()
    if len(layers) != len(sources):
        raise ValueError(f"model.layers must be the dense model's {len(sources)}, got {len(layers)}")
    for layer, source in zip(layers, sources, strict=True):
        _copy_block(source, layer)
    model.blocks = model.as_stack(layers)
    _copy(dense.embedding, model.embedding)
    _copy(dense.norm.scale, model.norm.scale)
    if model.head is not None:
        _copy(dense.embedding if dense.head is None else dense.head, model.head)
    return model


def _copy_block(source: Block, target: Block) -> None:
    for name in ("attention", "attention_norm", "ffn_norm"):
        jax.tree.map(_copy, *(nnx.state(getattr(block, name)) for block in (source, target)), is_leaf=_is_variable)
    moe, ffn = target.ffn, source.ffn
    assert isinstance(ffn, DenseFFN)
    for name, experts in (("w_up", "w_up_EDF"), ("w_gate", "w_gate_EDF"), ("w_down", "w_down_EFD")):
        _copy(getattr(ffn, name), getattr(moe, experts if isinstance(moe, MoE) else name))


def _is_variable(x) -> bool:
    return isinstance(x, nnx.Variable)


def _copy(source, target) -> None:
    """target = source, repeated over a leading dim of experts where target has one; sharded as target is."""
    if source.shape != target.shape[-source.ndim:]:
        raise ValueError(f"the dense model's array {source.shape} must fit {target.shape}; change model or moe.d_ff")
    spread = jax.jit(lambda a: jnp.broadcast_to(a, target.shape), out_shardings=target[...].sharding)
    target[...] = spread(source[...])
