"""The reference: loops in numpy for values, and its differentiable twin in jnp for gradients.

The twin takes the decisions (which expert, which pair is dropped) from the loops as constants. Weights are a dict: up,
down, gate (if gated), and the router's by their names.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import Cosine, ExpertChoice, NoisyTopK, Soft, TopK


@dataclass(frozen=True)
class Setting:
    """What a layer computes. capacity_factor: None drops nothing. group: "sequence", or pieces of the batch."""

    router: Any
    num_experts: int
    capacity_factor: float | None = None
    group: str | int = "sequence"
    activation: str = "swiglu"


class Given(NamedTuple):
    """Optional inputs: mask_BS, forced_BSK (-1 = free), bias_E, and noise_BSE that is added to logits."""

    mask: Any = None
    forced: Any = None
    bias: Any = None
    noise: Any = None


class Decisions(NamedTuple):
    """experts_BSK; used_BSK: pairs of a token and an expert; kept_BSK: those that were not dropped; valid_BS.

    pairs_E: how often each expert is used, which losses take as a constant.
    """

    experts: np.ndarray
    used: np.ndarray
    kept: np.ndarray
    valid: np.ndarray
    pairs: np.ndarray


def logits_of(xp, router, x, w, noise=None):
    """Logits [..., E] of x [..., D]; xp is numpy or jax.numpy."""
    if isinstance(router, Cosine):
        low, v = x @ w["w_DR"], w["v_RE"]
        lengths = xp.sqrt((low**2).sum(-1, keepdims=True)) * xp.sqrt((v**2).sum(0))
        return low @ v / lengths / xp.exp(w["log_tau"])
    logits = x @ w["w_DE"]
    return logits if noise is None else logits + noise * xp.log1p(xp.exp(x @ w["w_noise_DE"]))


def scores_of(xp, router, logits):
    if getattr(router, "score", "softmax") == "sigmoid":
        return 1 / (1 + xp.exp(-logits))
    e = xp.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def is_normalized(router):
    if isinstance(router, TopK) and router.normalize is not None:
        return router.normalize
    return getattr(router, "normalize", None) or (isinstance(router, TopK | NoisyTopK) and router.k > 1)


def groups_of(setting, B, S):
    """Tokens (b, s) of each group, in order of priority."""
    count = B if setting.group == "sequence" else setting.group
    size = B // count
    return [[(b, s) for s in range(S) for b in range(g * size, (g + 1) * size)] for g in range(count)]


def best(ranking, k):
    """Indices of the k largest, ties to the lowest index."""
    return sorted(range(len(ranking)), key=lambda i: (-ranking[i], i))[:k]


def top_experts(router, scores_E, bias_E):
    """One token's choices of TopK and its kin."""
    ranking = scores_E if bias_E is None else scores_E + bias_E
    groups, kept = getattr(router, "groups", 1), getattr(router, "groups_kept", 1)
    if kept < groups:
        pieces = np.split(ranking, groups)
        good = best([sum(sorted(piece)[-2:]) for piece in pieces], kept)
        ranking = np.concatenate([piece if g in good else piece - np.inf for g, piece in enumerate(pieces)])
    return best(ranking, router.k)


def choose(x, w, setting, given, valid):
    """experts_BSK and used_BSK, before anything is dropped."""
    router, (B, S, _), E = setting.router, x.shape, setting.num_experts
    scores = np.zeros((B, S, E))
    for b, s in np.ndindex(B, S):
        noise = None if given.noise is None else given.noise[b, s]
        scores[b, s] = scores_of(np, router, logits_of(np, router, x[b, s], w, noise))
    if isinstance(router, ExpertChoice):
        return take_tokens(scores, setting, valid)
    experts = np.zeros((B, S, router.k), int)
    for b, s in np.ndindex(B, S):
        experts[b, s] = top_experts(router, scores[b, s], given.bias)
        if given.forced is not None:
            experts[b, s] = np.where(given.forced[b, s] >= 0, given.forced[b, s], experts[b, s])
    return experts, np.broadcast_to(valid[..., None], experts.shape)


def take_tokens(scores, setting, valid):
    """Expert choice: a token's experts in order of their index, then those that did not take it."""
    B, S, E = scores.shape
    taken = np.zeros((B, S, E), bool)
    for group in groups_of(setting, B, S):
        take = max(1, math.ceil(setting.router.capacity_factor * len(group) / E))
        for e in range(E):
            for i in best([scores[t][e] if valid[t] else -np.inf for t in group], take):
                taken[group[i]][e] = valid[group[i]]
    experts = np.argsort(~taken, -1, kind="stable")
    return experts, np.take_along_axis(taken, experts, -1)


def decide(x, w, setting, given=Given()) -> Decisions:
    """Who goes where, and which pairs are dropped: by choice rank, position, batch index."""
    B, S, _ = x.shape
    valid = np.ones((B, S), bool) if given.mask is None else np.asarray(given.mask)
    if isinstance(setting.router, Soft):
        nothing = np.zeros((B, S, 0), int)
        shares = np.array([soft_share(np, soft_logits(np, x_D, w)).sum(1) for x_D in x[valid]])
        return Decisions(nothing, nothing, nothing, valid, shares.sum(0))
    experts, used = choose(x, w, setting, given, valid)
    kept, pairs = np.zeros(experts.shape, bool), getattr(setting.router, "k", None)
    pairs = min(setting.router.capacity_factor, setting.num_experts) if pairs is None else pairs
    for group in groups_of(setting, B, S):
        capacity = math.inf
        if setting.capacity_factor is not None:
            capacity = max(1, math.ceil(setting.capacity_factor * pairs * len(group) / setting.num_experts))
        load = np.zeros(setting.num_experts, int)
        for j in range(experts.shape[2]):
            for t in group:
                if used[t][j]:
                    kept[t][j] = load[experts[t][j]] < capacity
                    load[experts[t][j]] += 1
    return Decisions(experts, used, kept, valid, np.bincount(experts[used], minlength=setting.num_experts))


def act(z, activation):
    if activation == "relu":
        return np.maximum(z, 0)
    if activation == "gelu":
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return z / (1 + np.exp(-z))


def expert(x_D, w, e, activation):
    up = x_D @ w["up"][e]
    hidden = act(x_D @ w["gate"][e], activation) * up if "gate" in w else act(up, activation)
    return hidden @ w["down"][e]


def losses_of(pairs, weight, scores, z, count):
    """pairs_E, weight_E, scores_E: sums over tokens; z: sum of squared log-partitions; count: valid tokens."""
    E = len(pairs)
    return {"load_balance": E * (pairs / pairs.sum() * scores / count).sum(), "router_z": z / count,
            "importance": ((weight - weight.mean()) ** 2).mean() / weight.mean() ** 2}


def forward(x, w, setting, d: Decisions, given=Given()):
    """y_BSD and losses, by loops."""
    if isinstance(setting.router, Soft):
        return soft_forward(x, w, setting, d)
    y, router = np.zeros_like(x), setting.router
    weight, mean, z = np.zeros(setting.num_experts), 0.0, 0.0
    for b, s in zip(*np.nonzero(d.valid), strict=True):
        logits = logits_of(np, router, x[b, s], w, None if given.noise is None else given.noise[b, s])
        scores = scores_of(np, router, logits)
        mean = mean + scores
        z += (np.log(np.exp(logits - logits.max()).sum()) + logits.max()) ** 2
        weights = scores[d.experts[b, s]]
        weights = getattr(router, "scale", 1) * (weights / weights.sum() if is_normalized(router) else weights)
        for j, e in enumerate(d.experts[b, s]):
            if d.used[b, s, j]:
                weight[e] += weights[j]
            if d.kept[b, s, j]:
                y[b, s] += weights[j] * expert(x[b, s], w, e, setting.activation)
        y[b, s] += shared(np, x[b, s], w, setting.activation)
    return y, losses_of(d.pairs, weight, mean, z, d.valid.sum())


def shared(xp, x, w, activation):
    """Sum of the experts that every token goes to."""
    if "shared_up" not in w:
        return 0 * x
    f = {"swiglu": lambda z: z / (1 + xp.exp(-z))}[activation]
    up, gate = (xp.einsum("...d,edf->...ef", x, w[name]) for name in ("shared_up", "shared_gate"))
    return xp.einsum("...ef,efd->...d", f(gate) * up, w["shared_down"])


def soft_share(xp, logits):
    """Softmax over all slots [..., E, C]."""
    e = xp.exp(logits - logits.max((-2, -1), keepdims=True))
    return e / e.sum((-2, -1), keepdims=True)


def soft_logits(xp, x, w):
    """[..., E, C]: cosines of tokens and slots, scaled."""
    phi = w["phi_DEC"] / xp.sqrt((w["phi_DEC"] ** 2).sum(0))
    return w["scale"] * xp.einsum("...d,dec->...ec", x / xp.sqrt((x**2).sum(-1, keepdims=True)), phi)


def soft_forward(x, w, setting, d):
    y, (B, S, _), (_, E, C) = np.zeros_like(x), x.shape, w["phi_DEC"].shape
    scores, z = np.zeros(E), 0.0
    for group in groups_of(setting, B, S):
        group = [t for t in group if d.valid[t]]
        logits = np.array([soft_logits(np, x[t], w) for t in group])
        mix = np.exp(logits) / np.exp(logits).sum(0)
        out = np.array([[expert(sum(mix[i, e, c] * x[t] for i, t in enumerate(group)), w, e, setting.activation)
                         for c in range(C)] for e in range(E)])
        for i, t in enumerate(group):
            share = soft_share(np, logits[i])
            y[t] = (share[..., None] * out).sum((0, 1)) + shared(np, x[t], w, setting.activation)
            scores += share.sum(1)
            z += np.log(np.exp(logits[i]).sum()) ** 2
    return y, losses_of(d.pairs, scores, scores, z, d.valid.sum())


def every_expert(x, w, activation):
    """Outputs [..., E, D] of all experts, in jnp."""
    f = {"swiglu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation]
    up = jnp.einsum("...d,edf->...ef", x, w["up"])
    hidden = f(jnp.einsum("...d,edf->...ef", x, w["gate"])) * up if "gate" in w else f(up)
    return jnp.einsum("...ef,efd->...ed", hidden, w["down"])


def twin(x, w, setting, d: Decisions, given=Given()):
    """`forward` in jnp: every expert for every token, then masks."""
    if isinstance(setting.router, Soft):
        return soft_twin(x, w, setting, d)
    router, E = setting.router, setting.num_experts
    logits = logits_of(jnp, router, x, w, given.noise)
    scores = scores_of(jnp, router, logits)
    weights = jnp.take_along_axis(scores, d.experts, -1)
    weights = getattr(router, "scale", 1) * (weights / weights.sum(-1, keepdims=True) if is_normalized(router)
                                             else weights)
    chosen = jnp.take_along_axis(every_expert(x, w, setting.activation), d.experts[..., None], 2)
    y = (jnp.where(d.kept, weights, 0)[..., None] * chosen).sum(2) + shared_twin(x, w, setting, d)
    onehot = (d.experts[..., None] == np.arange(E)) & d.used[..., None]
    weight = jnp.where(onehot, weights[..., None], 0).sum((0, 1, 2))
    mean = jnp.where(d.valid[..., None], scores, 0).sum((0, 1))
    z = jnp.where(d.valid, jax.nn.logsumexp(logits, -1) ** 2, 0).sum()
    return y, losses_of(d.pairs, weight, mean, z, d.valid.sum())


def shared_twin(x, w, setting, d):
    return jnp.where(d.valid[..., None], shared(jnp, x, w, setting.activation), 0)


def soft_twin(x, w, setting, d):
    """Only where a group is a sequence."""
    assert setting.group == "sequence"
    logits, valid = soft_logits(jnp, x, w), d.valid[..., None, None]
    share = jnp.where(valid, soft_share(jnp, logits), 0)
    mix = jax.nn.softmax(jnp.where(valid, logits, -jnp.inf), 1)
    out = every_expert(jnp.einsum("bsec,bsd->becd", mix, x), w, setting.activation)
    y = jnp.einsum("bsec,beced->bsd", share, out)
    scores, z = share.sum((0, 1, 3)), jnp.where(d.valid, jax.nn.logsumexp(logits, (2, 3)) ** 2, 0).sum()
    return y + shared_twin(x, w, setting, d), losses_of(d.pairs, scores, scores, z, d.valid.sum())
