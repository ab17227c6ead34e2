"""Optimizer, sharded initial state and the compiled training and evaluation steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxmoe.models.decoder import DecoderLM
from jaxmoe.plan.execute import no_counts
from jaxmoe.plan.plan import Plan
from jaxmoe.plan.prove import compile_options
from jaxmoe.planned.exchange import CODEC_METRICS, metrics_of
from jaxmoe.planning import plan

Batch = dict[str, jax.Array]
# Every metric of a microbatch is averaged by its share of valid tokens, but these.
SUMMED = ("dropped_pairs", "nonfinite_tokens", *(n for n, over in CODEC_METRICS.items() if over is jnp.sum))
LARGEST = ("sufficient_capacity_factor", *(n for n, over in CODEC_METRICS.items() if over is jnp.max))


def learning_rate_schedule(cfg: Any) -> optax.Schedule:
    """Linear warm-up, then "constant", or "cosine" down to the minimum at the last step."""
    t = cfg.train
    warmup = min(t.warmup_steps, t.steps - 1)
    start = 0.0 if warmup else t.learning_rate
    if t.schedule == "constant":
        rise = optax.linear_schedule(start, t.learning_rate, max(warmup, 1))
        return optax.join_schedules([rise, optax.constant_schedule(t.learning_rate)], [warmup])
    return optax.warmup_cosine_decay_schedule(
        start, t.learning_rate, warmup, max(t.steps, warmup + 1), end_value=t.min_learning_rate)


def _is_decayed(params: Any) -> Any:
    """True for matrices. Norm scales, biases and temperatures stay as they are, also where layers are stacked."""

    def decayed(path: Any, p: Any) -> bool:
        names = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
        kept = any(n == "scale" or "norm" in n or "bias" in n or "log_tau" in n for n in names)
        return p.ndim >= 2 and not kept

    return jax.tree_util.tree_map_with_path(decayed, params)


def make_optimizer(cfg: Any) -> optax.GradientTransformation:
    """Clipped AdamW."""
    t = cfg.train
    adamw = optax.adamw(learning_rate_schedule(cfg), t.b1, t.b2, t.eps, weight_decay=t.weight_decay, mask=_is_decayed)
    return optax.chain(optax.clip_by_global_norm(t.clip_norm), adamw)


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
                return param.sharding
        return replicated

    shardings = jax.tree_util.tree_map_with_path(place, opt_state)
    # Under jit rather than device_put, which needs equal values in every process and a transfer.
    return jax.jit(lambda tree: tree, out_shardings=shardings)(opt_state)


def init_state(cfg: Any, mesh: jax.sharding.Mesh, made: Plan | None = None) -> tuple[DecoderLM, nnx.Optimizer]:
    """The model and its optimizer, whose state is sharded as the parameters are. made: None = the plan of cfg."""
    model = DecoderLM(cfg, mesh, rngs=nnx.Rngs(cfg.train.seed))
    if made is not None or cfg.schedule.is_planned:
        model.plan = made or plan(cfg)
    optimizer = nnx.Optimizer(model, make_optimizer(cfg), wrt=nnx.Param)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    state = nnx.state(optimizer)
    placed = _place_like_params(nnx.to_pure_dict(state), params, mesh)
    nnx.replace_by_pure_dict(state, placed)
    nnx.update(optimizer, state)
    return model, optimizer


def global_norm(tree: Any) -> jax.Array:
    """sqrt(sum of squares) over all leaves, float32: the logical tree's, however its arrays are sharded."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def all_finite(tree: Any) -> jax.Array:
    """True if no floating leaf holds NaN or Inf."""
    floating = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in floating]))


def as_batch(batch: Batch | jax.Array) -> Batch:
    """tokens [B, S+1] int; mask: False = padding, neither routed nor scored; loss_mask: False = not a target;
    segment_ids: document of each token, the first token of a document is no target. All [B, S+1]; all but tokens
    may be left out. A bare array is the tokens."""
    return batch if isinstance(batch, dict) else {"tokens": batch}


def target_mask(batch: Batch) -> jax.Array:
    """[B, S] bool: which targets are scored."""
    tokens = batch["tokens"]
    scored_BS = jnp.ones((tokens.shape[0], tokens.shape[1] - 1), bool)
    if "mask" in batch:
        scored_BS &= (batch["mask"][:, 1:] & batch["mask"][:, :-1]).astype(bool)
    if "loss_mask" in batch:
        scored_BS &= batch["loss_mask"][:, 1:].astype(bool)
    if "segment_ids" in batch:
        scored_BS &= batch["segment_ids"][:, 1:] == batch["segment_ids"][:, :-1]
    return scored_BS


def counts(batch: Batch) -> jax.Array:
    """float32 [2]: scored targets, valid input tokens. Each at least 1."""
    B, length = batch["tokens"].shape
    valid = batch["mask"][:, :-1].sum() if "mask" in batch else B * (length - 1)
    return jnp.maximum(jnp.stack([target_mask(batch).sum(), jnp.asarray(valid)]), 1).astype(jnp.float32)


def cross_entropy_sum(logits_BSV: jax.Array, targets_BS: jax.Array, scored_BS: jax.Array) -> jax.Array:
    """Sum of nats over scored targets, in float32 whatever the precision of the model."""
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV.astype(jnp.float32), targets_BS)
    return jnp.where(scored_BS, losses_BS, 0).sum()


def call_model(model: Any, batch: Batch, **options: Any) -> tuple[jax.Array, Any]:
    """logits [B, S, V] and aux on the batch's inputs. options that the model does not take are left out: key, of the
    router's noise; sink, for counters of the backward pass."""
    taken = inspect.signature(type(model).__call__).parameters
    options = {name: value for name, value in options.items() if value is not None and name in taken}
    if "mask" in batch:
        options["token_mask"] = batch["mask"][:, :-1].astype(bool)
    if "segment_ids" in batch:
        options["segment_ids"] = batch["segment_ids"][:, :-1]
    return model(batch["tokens"][:, :-1], **options)


def measure(model: Any, batch: Batch, whole: jax.Array, **options: Any) -> dict[str, Any]:
    """A microbatch's part of the metrics of a batch with counts `whole`: parts sum to the batch's."""
    logits_BSV, aux = call_model(model, batch, **options)
    share = (counts(batch) / whole)[1]
    metrics = {**aux.losses, **aux.metrics, "dropped_fraction": aux.dropped_fraction}
    metrics = {name: m if name in (*SUMMED, *LARGEST) else share * m for name, m in metrics.items()}
    loss_sum = cross_entropy_sum(logits_BSV, batch["tokens"][:, 1:], target_mask(batch))
    return {"loss": loss_sum / whole[0], "tokens_per_expert": aux.tokens_per_expert, **metrics}


def total_loss(metrics: dict[str, jax.Array], coefs: dict[str, float]) -> jax.Array:
    """Cross-entropy plus coefficient * auxiliary loss of each name in coefs."""
    return metrics["loss"] + sum(c * metrics[name] for name, c in coefs.items() if c and name in metrics)


def microbatches(batch: Batch, accumulate: int) -> Batch:
    """[B, ...] -> [A, B/A, ...]. Row r goes to microbatch r % A, so that every device keeps its own rows."""
    return jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)


def gradients(model: Any, batch: Batch, coefs: dict[str, float], accumulate: int = 1, key: jax.Array | None = None):
    """(metrics, gradients) of the batch, as if it were computed at once, from `accumulate` microbatches.

    Cross-entropy is a mean over all scored targets; auxiliary losses are means over microbatches, weighted by their
    valid tokens; tokens_per_expert is a sum. Counters of coded collectives are of both passes.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    whole, plan = counts(batch), getattr(model, "plan", None)
    sink = None if plan is None else no_counts(plan.block)

    def loss_fn(params: Any, sink: Any, micro: Batch, key: jax.Array | None):
        metrics = measure(nnx.merge(graph, params, rest, copy=True), micro, whole, key=key, sink=sink)
        return total_loss(metrics, coefs), metrics

    def grad_fn(micro: Batch, key: jax.Array | None):
        (grads, counted), metrics = jax.grad(loss_fn, (0, 1), has_aux=True)(params, sink, micro, key)
        return grads, with_backward(metrics, counted)

    if accumulate == 1:
        grads, metrics = grad_fn(batch, key)
        return metrics, grads

    def body(total: Any, i_micro: Any):
        i, micro = i_micro
        grads, metrics = grad_fn(micro, None if key is None else jax.random.fold_in(key, i))
        return jax.tree.map(jnp.add, total, grads), metrics

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, parts = jax.lax.scan(body, zeros, (jnp.arange(accumulate), microbatches(batch, accumulate)))
    return {n: p.max(0) if n in LARGEST else p.sum(0) for n, p in parts.items()}, grads


def with_backward(metrics: dict[str, jax.Array], counted: Any) -> dict[str, jax.Array]:
    """Metrics with the counters of the backward pass added to the forward pass's."""
    new = metrics_of(counted or {})
    return metrics | {n: CODEC_METRICS[n](jnp.stack([metrics[n], value]), axis=0)
                      for n, value in new.items() if n in metrics}


def step_function(cfg: Any, graph: Any) -> Any:
    """f(state, batch) -> state, metrics: the train step of cfg on `nnx.split((model, optimizer))`'s graph and state."""

    def step(state: Any, batch: Batch | jax.Array):
        model, optimizer = nnx.merge(graph, state)
        metrics = _train_step(model, optimizer, batch, cfg.moe.load_balance_coef, cfg.moe.router_z_coef,
                              cfg.moe.importance_coef, cfg.train.accumulate, cfg.train.seed)
        return nnx.state((model, optimizer)), metrics

    return step


def _train_step(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch: Batch | jax.Array,
    load_balance_coef: float = 0.01,
    router_z_coef: float = 1e-3,
    importance_coef: float = 0.0,
    accumulate: int = 1,
    seed: int = 0,
) -> dict[str, jax.Array]:
    """One optimizer step on a batch (see `as_batch`); updates model and optimizer in place; returns metrics.

    A step whose loss, gradients or new parameters are not finite leaves both as they were, so the last good state can
    still be saved by a caller that sees the bad metrics later. Metrics `finite_...` say which of them was finite.
    """
    coefs = {"load_balance": load_balance_coef, "router_z": router_z_coef, "importance": importance_coef}
    key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...])
    before = nnx.state((model, optimizer))
    metrics, grads = gradients(model, as_batch(batch), coefs, accumulate, key)
    optimizer.update(model, grads)
    tokens_per_expert = metrics.pop("tokens_per_expert")
    update_router_bias = getattr(model, "update_router_bias", None)
    if update_router_bias is not None:
        update_router_bias(tokens_per_expert)
    metrics |= {"total": total_loss(metrics, coefs), "grad_norm": global_norm(grads)}
    metrics |= {
        "finite_loss": jnp.isfinite(metrics["loss"]),
        "finite_router_losses": all_finite([metrics[name] for name, c in coefs.items() if c and name in metrics] or
                                           [metrics["loss"]]),
        "finite_gradients": jnp.isfinite(metrics["grad_norm"]),
        "finite_parameters": all_finite(nnx.state(model, nnx.Param)),
    }
    finite = jnp.stack([v for name, v in metrics.items() if name.startswith("finite_")]).all()
    after = nnx.state((model, optimizer))
    nnx.update((model, optimizer), jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, before))
    return metrics


def compiled_step(cfg: Any, model: Any, optimizer: nnx.Optimizer) -> Callable[..., dict[str, jax.Array]]:
    """f(batch) -> metrics: one optimizer step of cfg, in place. The old arrays' memory is used for the new ones.

    On GPUs, XLA gets the options that the model's plan needs, the same that `prove` compiles with.
    """
    graph, _ = nnx.split((model, optimizer))
    options = compile_options(model.plan) if jax.default_backend() == "gpu" else None
    step = jax.jit(step_function(cfg, graph), donate_argnums=0, compiler_options=options)

    def advance(batch: Batch | jax.Array) -> dict[str, jax.Array]:
        state, metrics = step(nnx.state((model, optimizer)), batch)
        nnx.update((model, optimizer), state)
        return metrics

    return advance


train_step = partial(nnx.jit, static_argnames=(
    "load_balance_coef", "router_z_coef", "importance_coef", "accumulate", "seed"))(_train_step)


@nnx.jit
def eval_step(model: nnx.Module, batch: Batch | jax.Array) -> dict[str, jax.Array]:
    """The metrics of a batch without a gradient, and without the router's noise."""
    batch = as_batch(batch)
    metrics = measure(model, batch, counts(batch))
    metrics.pop("tokens_per_expert")
    return metrics
