"""Sampling from a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@partial(jax.jit, static_argnames="top_k")
def _draw(logits_V: jax.Array, temperature: float, key: jax.Array, top_k: int | None) -> jax.Array:
    """A token of softmax(logits / temperature), out of the top_k likeliest; at temperature 0 the likeliest."""
    if top_k is not None:
        least = jax.lax.top_k(logits_V, min(top_k, logits_V.size))[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    scaled_V = logits_V / jnp.where(temperature > 0, temperature, 1)
    return jnp.where(temperature > 0, jax.random.categorical(key, scaled_V), logits_V.argmax())


def sample(
    model: Any, tokens: Sequence[int] | np.ndarray, num_tokens: int, temperature: float, key: jax.Array, *,
    window: int = 128, top_k: int | None = None,
) -> list[int]:
    """`num_tokens` tokens that follow `tokens`; temperature 0 takes the likeliest, top_k None may take any.

    The model sees at most `window` tokens. Of a longer prompt the last `window` count. When the window is full, the
    text's last half window is read anew, and goes on from there.
    """
    if not len(tokens):
        raise ValueError("the prompt must hold at least one token, got none")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    text = [int(t) for t in tokens]
    cache, used, step = model.init_cache(1, window), 0, text[-window:]
    for key_step in jax.random.split(key, num_tokens) if num_tokens else ():
        if used + len(step) > window:
            cache, used, step = model.init_cache(1, window), 0, text[-max(window // 2, 1):]
        logits_BSV, cache = model.decode(cache, jnp.asarray([step], jnp.int32))
        used += len(step)
        step = [int(_draw(logits_BSV[0, -1], temperature, key_step, top_k))]
        text += step
    return text[len(tokens):]


def trained_model(run_dir: str, cfg: Any) -> Any:
    """The model of the run's newest checkpoint, on the mesh of cfg. Raises ValueError if there is none."""
    from ..mesh import make_mesh
    from ..models.decoder import DecoderLM
    from .checkpoint import Checkpoints, has_checkpoints

    if not has_checkpoints(run_dir):
        raise ValueError(f"run_dir must hold a checkpoint, got {str(run_dir)!r}")
    model = DecoderLM(cfg, make_mesh(cfg), rngs=nnx.Rngs(cfg.train.seed))
    checkpoints = Checkpoints(run_dir)
    try:
        checkpoints.restore_model(model)
    finally:
        checkpoints.close()
    return model


def generate(
    run_dir: str, prompt: str, num_tokens: int, temperature: float = 0.8, seed: int = 0, top_k: int | None = None
) -> str:
    """The text that the run's newest checkpoint writes after `prompt`, of which the last model.seq tokens count."""
    from .checkpoint import read_config
    from .data import make_codec

    cfg = read_config(run_dir)
    model = trained_model(run_dir, cfg)
    codec = make_codec(cfg.train.data.tokenizer)
    tokens = codec.encode(prompt.encode())
    drawn = sample(model, tokens, num_tokens, temperature, jax.random.key(seed), window=cfg.model.seq, top_k=top_k)
    return codec.decode(drawn)
