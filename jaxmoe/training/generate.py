"""Sampling from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@nnx.jit
def _logits_at(model: Any, window_BS: Any, length: Any) -> jax.Array:
    """Logits [V] after the first `length` tokens of row 0; the padding sits at the end."""
    mask_BS = jnp.broadcast_to(jnp.arange(window_BS.shape[1]) < length, window_BS.shape)
    logits_BSV, _ = model(window_BS, token_mask=mask_BS)
    return jax.lax.dynamic_index_in_dim(logits_BSV[0], length - 1, keepdims=False)


def _draw(logits_V: Any, temperature: float, key: jax.Array) -> int:
    logits_V = np.asarray(logits_V, np.float32)
    if temperature == 0.0:
        return int(logits_V.argmax())
    return int(jax.random.categorical(key, logits_V / temperature))


def sample(
    model: nnx.Module,
    tokens: Any,
    num_tokens: int,
    temperature: float,
    key: jax.Array,
    *,
    window: int = 128,
) -> list[int]:
    """`num_tokens` tokens that follow `tokens`; temperature 0 takes the likeliest.

    A model with `decode(cache, tokens_BS)` and `init_cache(1, length)` is sampled with its
    cache. Any other is recomputed on the last `window` tokens, one shape, so compiled once.
    """
    if not len(tokens):
        raise ValueError("the prompt must hold at least one token, got none")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if hasattr(model, "decode") and hasattr(model, "init_cache"):
        return _sample_cached(model, tokens, num_tokens, temperature, key)
    text = [int(t) for t in tokens]
    for key_step in jax.random.split(key, num_tokens) if num_tokens else ():
        recent = text[-window:]
        window_BS = np.zeros((1, window), np.int32)
        window_BS[:, : len(recent)] = recent
        logits_V = _logits_at(model, window_BS, jnp.int32(len(recent)))
        text.append(_draw(logits_V, temperature, key_step))
    return text[len(tokens) :]


def _sample_cached(
    model: Any, tokens: Sequence[int], num_tokens: int, temperature: float, key: jax.Array
) -> list[int]:
    cache = model.init_cache(1, len(tokens) + num_tokens)
    step_BS = jnp.asarray(tokens, jnp.int32)[None]
    drawn: list[int] = []
    for key_step in jax.random.split(key, num_tokens) if num_tokens else ():
        logits_BSV, cache = model.decode(cache, step_BS)
        drawn.append(_draw(logits_BSV[0, -1], temperature, key_step))
        step_BS = jnp.full((1, 1), drawn[-1], jnp.int32)
    return drawn


def generate(
    run_dir: str, prompt: str, num_tokens: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """The text that the run's newest checkpoint writes after `prompt`."""
    from jaxmoe.mesh import make_mesh
    from jaxmoe.models.decoder import DecoderLM
    from jaxmoe.training.checkpoint import Checkpoints, has_checkpoints, read_config
    from jaxmoe.training.data import make_codec

    cfg = read_config(run_dir)
    if not has_checkpoints(run_dir):
        raise ValueError(f"run_dir must hold a checkpoint, got {str(run_dir)!r}")
    codec = make_codec(cfg.train.data.tokenizer)
    mesh = make_mesh(cfg)
    model = DecoderLM(cfg, mesh, rngs=nnx.Rngs(cfg.train.seed))
    checkpoints = Checkpoints(run_dir)
    try:
        checkpoints.restore_model(model)
    finally:
        checkpoints.close()
    drawn = sample(
        model,
        codec.encode(prompt.encode()),
        num_tokens,
        temperature,
        jax.random.key(seed),
        window=cfg.model.seq,
    )
    return codec.decode(drawn)
