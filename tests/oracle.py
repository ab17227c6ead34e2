"""The reference: loops in numpy for values, and its differentiable twin in jnp for gradients.

The twin takes the decisions (which expert, which pair is dropped) from the loops as constants.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Decisions:
    experts_BSK: np.ndarray
    kept_BSK: np.ndarray
    valid_BS: np.ndarray


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def decide(x_BSD, w_router_DE, k, capacity_factor=None, group="sequence", mask_BS=None, forced_BSK=None) -> Decisions:
    """Top-k with ties to the lowest index; capacity per group by choice rank, position, batch index."""
    B, S, _ = x_BSD.shape
    E = w_router_DE.shape[1]
    valid = np.ones((B, S), bool) if mask_BS is None else mask_BS
    chosen, kept = np.zeros((B, S, k), int), np.zeros((B, S, k), bool)
    for b in range(B):
        for s in range(S):
            scores = softmax(x_BSD[b, s] @ w_router_DE)
            chosen[b, s] = sorted(range(E), key=lambda e: (-scores[e], e))[:k]
            if forced_BSK is not None:
                chosen[b, s] = np.where(forced_BSK[b, s] >= 0, forced_BSK[b, s], chosen[b, s])
    groups = B if group == "sequence" else group
    size = B // groups
    capacity = math.inf if capacity_factor is None else max(1, math.ceil(capacity_factor * k * size * S / E))
    for g in range(groups):
        load = np.zeros(E, int)
        for j in range(k):
            for s in range(S):
                for b in range(g * size, (g + 1) * size):
                    if valid[b, s]:
                        e = chosen[b, s, j]
                        kept[b, s, j] = load[e] < capacity
                        load[e] += 1
    return Decisions(chosen, kept, valid)


def act(z, activation):
    if activation == "relu":
        return np.maximum(z, 0)
    if activation == "gelu":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z / (1 + np.exp(-z))


def forward(x_BSD, w, d: Decisions, activation="swiglu"):
    """y_BSD, load balance, router z, by loops. w: dict of router, up, down and, if gated, gate."""
    y, (B, S, _), k = np.zeros_like(x_BSD), x_BSD.shape, d.experts_BSK.shape[2]
    E = w["router"].shape[1]
    pairs, mean, z, count = np.zeros(E), np.zeros(E), 0.0, 0
    for b in range(B):
        for s in range(S):
            if not d.valid_BS[b, s]:
                continue
            x, logits = x_BSD[b, s], x_BSD[b, s] @ w["router"]
            scores = softmax(logits)
            count += 1
            mean += scores
            z += (np.log(np.exp(logits - logits.max()).sum()) + logits.max()) ** 2
            weights = scores[d.experts_BSK[b, s]]
            weights = weights / weights.sum() if k > 1 else weights
            for j in range(k):
                e = d.experts_BSK[b, s, j]
                pairs[e] += 1
                if d.kept_BSK[b, s, j]:
                    up = x @ w["up"][e]
                    hidden = act(x @ w["gate"][e], activation) * up if "gate" in w else act(up, activation)
                    y[b, s] += weights[j] * (hidden @ w["down"][e])
    return y, E * (pairs / pairs.sum() * mean / count).sum(), z / count


def twin(x_BSD, w, d: Decisions, activation="swiglu"):
    """`forward` in jnp: every expert for every token, then masks."""
    k, E = d.experts_BSK.shape[2], w["router"].shape[1]
    logits = x_BSD @ w["router"]
    scores = jax.nn.softmax(logits)
    weights = jnp.take_along_axis(scores, d.experts_BSK, -1)
    weights = weights / weights.sum(-1, keepdims=True) if k > 1 else weights
    f = {"swiglu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation]
    up = jnp.einsum("bsd,edf->bsef", x_BSD, w["up"])
    hidden = f(jnp.einsum("bsd,edf->bsef", x_BSD, w["gate"])) * up if "gate" in w else f(up)
    out = jnp.einsum("bsef,efd->bsed", hidden, w["down"])
    chosen = jnp.take_along_axis(out, d.experts_BSK[..., None], 2)
    y = (jnp.where(d.kept_BSK, weights, 0)[..., None] * chosen).sum(2)
    count = d.valid_BS.sum()
    onehot = (d.experts_BSK[..., None] == np.arange(E)) & d.valid_BS[..., None, None]
    pairs = onehot.sum((0, 1, 2))
    mean = jnp.where(d.valid_BS[..., None], scores, 0).sum((0, 1)) / count
    z = jnp.where(d.valid_BS, jax.nn.logsumexp(logits, -1) ** 2, 0).sum() / count
    return y, E * (pairs / pairs.sum() * mean).sum(), z
