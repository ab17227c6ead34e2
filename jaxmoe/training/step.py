"""Optimizer, sharded initial state and the compiled training and evaluation steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def learning_rate_schedule(cfg: Any) -> optax.Schedule:
    """Linear warm-up, then cosine down to the minimum at the last optimizer update."""
    train = cfg.train
    # With accumulation the optimizer updates once per `accumulate` steps, and counts updates.
    updates = max(train.steps // train.accumulate, 1)
    warmup_updates = min(train.warmup_steps // train.accumulate, updates - 1)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup_updates else train.learning_rate,
        peak_value=train.learning_rate,
        warmup_steps=warmup_updates,
        decay_steps=max(updates, warmup_updates + 1),
        end_value=train.min_learning_rate,
    )


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def make_optimizer(cfg: Any) -> optax.GradientTransformation:
    """Clipped AdamW; vectors such as norm scales are not decayed."""
    train = cfg.train
    tx = optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(
            learning_rate_schedule(cfg),
            b1=0.9,
            b2=0.95,
            weight_decay=train.weight_decay,
            mask=_is_matrix,
        ),
    )
    if train.accumulate > 1:
        tx = optax.MultiSteps(tx, train.accumulate).gradient_transformation()
    return tx


def _place_like_params(opt_state: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Each optimizer array takes the sharding of the parameter whose path it ends with."""
    by_path = {
        tuple(map(str, path)): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def place(path: Any, leaf: Any) -> Any:
        names = tuple(map(str, path))
        for start in range(len(names)):
            param = by_path.get(names[start:])
            if param is not None and param.shape == leaf.shape:
                return jax.device_put(leaf, param.sharding)
        return jax.device_put(leaf, replicated)

    return jax.tree_util.tree_map_with_path(place, opt_state)


def init_state(cfg: Any, mesh: jax.sharding.Mesh) -> tuple[nnx.Module, nnx.Optimizer]:
    """The model and its optimizer, whose state is sharded as the parameters are."""
    from jaxmoe.models.decoder import DecoderLM

    model = DecoderLM(cfg, mesh, rngs=nnx.Rngs(cfg.train.seed))
    optimizer = nnx.Optimizer(model, make_optimizer(cfg), wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = nnx.state(optimizer)
    placed = _place_like_params(nnx.to_pure_dict(state), params, mesh)
    nnx.replace_by_pure_dict(state, placed)
    nnx.update(optimizer, state)
    return model, optimizer


def cross_entropy(logits_BSV: jax.Array, targets_BS: jax.Array) -> jax.Array:
    """Mean nats per token, in float32 whatever the precision of the model."""
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(
        logits_BSV.astype(jnp.float32), targets_BS
    )
    return losses_BS.mean()


def _metrics(model: nnx.Module, tokens: jax.Array) -> dict[str, jax.Array]:
    logits_BSV, aux = model(tokens[:, :-1])
    return {
        "loss": cross_entropy(logits_BSV, tokens[:, 1:]),
        "load_balance": aux.losses["load_balance"],
        "router_z": aux.losses["router_z"],
        "dropped_fraction": aux.dropped_fraction,
    }


def _total_loss(
    model: nnx.Module, tokens: jax.Array, load_balance_coef: float, router_z_coef: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    metrics = _metrics(model, tokens)
    total = (
        metrics["loss"]
        + load_balance_coef * metrics["load_balance"]
        + router_z_coef * metrics["router_z"]
    )
    return total, metrics


@nnx.jit(static_argnames=("load_balance_coef", "router_z_coef"))
def train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    tokens: jax.Array,
    load_balance_coef: float = 0.01,
    router_z_coef: float = 1e-3,
) -> dict[str, jax.Array]:
    """One gradient on tokens [B, S+1]; updates model and optimizer in place.

    A step whose loss or gradient is not finite leaves both as they were, so the last good
    state can still be saved by a caller that sees the bad metrics later.
    """

    def loss_fn(model: nnx.Module) -> tuple[jax.Array, dict[str, jax.Array]]:
        return _total_loss(model, tokens, load_balance_coef, router_z_coef)

    (total, metrics), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    grad_norm = optax.tree.norm(grads)
    before = nnx.state((model, optimizer))
    optimizer.update(model, grads)
    finite = jnp.isfinite(total) & jnp.isfinite(grad_norm)
    after = nnx.state((model, optimizer))
    nnx.update((model, optimizer), jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, before))
    return {**metrics, "grad_norm": grad_norm, "total": total}


@nnx.jit
def eval_step(model: nnx.Module, tokens: jax.Array) -> dict[str, jax.Array]:
    """The metrics of tokens [B, S+1] without a gradient."""
    return _metrics(model, tokens)
