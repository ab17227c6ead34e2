"""Time of the MoE layer beside its bound: one plain dense SwiGLU product over as many rows as the layout holds.

The bound has no routing, no exchange and no second expert; same type, same run, same device or devices' cores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..dispatch import Dispatch, Ragged, Slots
from ..layer import MoE
from ..mesh import Roles
from ..routing import TopK
from .timing import seconds_of


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; tokens are those of the global batch."""

    tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    k: int


SHAPES = {"a": Shape(4096, 512, 1024, 8, 2), "b": Shape(4096, 512, 256, 32, 4)}
ROUTINGS: dict[str, float] = {"uniform": 0.0, "zipf": 1.0}
LAYOUTS: dict[str, Dispatch] = {"slots": Slots(1.0), "ragged": Ragged()}


def bench_layer(shape: Shape, routings: dict[str, float] = ROUTINGS, repeats: int = 7) -> list[dict[str, Any]]:
    """One row a layout and routing: seconds forward and forward + backward, with the bound's.

    Expert parallelism over all devices, float32. rows: of the bound; padding: rows that the layout moves, over
    those, for ragged in all rounds. routings: name -> exponent a of expert e's popularity (e + 1)^-a.
    """
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("device",), axis_types=(AxisType.Auto,))
    rows = []
    for layout, dispatch in LAYOUTS.items():
        moe = MoE(shape.d_model, shape.d_ff, shape.num_experts, router=TopK(shape.k), dispatch=dispatch, mesh=mesh,
                  roles=Roles(data=("device",), expert=("device",)), rngs=nnx.Rngs(0))
        multiplied = _rows_multiplied(dispatch, shape, count)
        bound = _bound(shape, multiplied)
        for routing, exponent in routings.items():
            held = _rows_held(dispatch, shape, count, exponent)
            calls = _layer(moe, shape, mesh, exponent) | bound
            seconds, spread = seconds_of(calls, repeats)
            rows.append({
                "dispatch": layout, "routing": routing, "rows": multiplied, "padding": held / multiplied,
                "forward_seconds": seconds["forward"], "forward_bound_seconds": seconds["forward_bound"],
                "forward_tokens_per_second": shape.tokens / seconds["forward"],
                "forward_backward_seconds": seconds["both"], "bound_seconds": seconds["both_bound"],
                "forward_backward_tokens_per_second": shape.tokens / seconds["both"],
                "ratio": seconds["both"] / seconds["both_bound"], "spread": spread["both"],
            })
    return rows


def _rows_multiplied(dispatch: Dispatch, shape: Shape, count: int) -> int:
    """Rows that experts multiply: slots, full or not, or the pairs."""
    if isinstance(dispatch, Slots):
        return count * shape.num_experts * dispatch.capacity(TopK(shape.k), shape.tokens // count, shape.num_experts)
    return shape.tokens * shape.k


def _rows_held(dispatch: Dispatch, shape: Shape, count: int, exponent: float) -> int:
    """Rows that are moved: slots, or those of buckets in all rounds."""
    if isinstance(dispatch, Slots):
        return _rows_multiplied(dispatch, shape, count)
    sizes = shape.tokens // count, TopK(shape.k), shape.num_experts, count
    device_SP = _popular(shape, exponent).reshape(count, -1) // (shape.num_experts // count)
    fullest = max(np.bincount(device_P, minlength=count).max() for device_P in device_SP)
    return -(-int(fullest) // dispatch.bucket_rows(*sizes)) * dispatch.buffer_rows(*sizes) * count


def _layer(moe: MoE, shape: Shape, mesh: Mesh, exponent: float) -> dict[str, Callable[[], Any]]:
    count = mesh.size
    tokens = NamedSharding(mesh, P("device"))
    x_BSD = jax.random.normal(jax.random.key(0), (count, shape.tokens // count, shape.d_model))
    forced_BSK = _popular(shape, exponent).reshape(count, -1, shape.k)
    x_BSD, forced_BSK = jax.device_put(x_BSD, tokens), jax.device_put(forced_BSK, tokens)
    graph, state = nnx.split(moe)

    def forward(state, x_BSD, forced_BSK):
        return nnx.merge(graph, state)(x_BSD, forced_experts=forced_BSK)[0]

    def loss(state, x_BSD, forced_BSK):
        return (forward(state, x_BSD, forced_BSK) ** 2).sum()

    once, both = jax.jit(forward), jax.jit(jax.grad(loss, (0, 1)))
    return {"forward": lambda: once(state, x_BSD, forced_BSK), "both": lambda: both(state, x_BSD, forced_BSK)}


def _popular(shape: Shape, exponent: float) -> np.ndarray:
    """k different experts a token [T, K], drawn by popularity (Gumbel top-k)."""
    rng = np.random.default_rng(0)
    popularity_E = -exponent * np.log(np.arange(1, shape.num_experts + 1))
    score_TE = popularity_E + rng.gumbel(size=(shape.tokens, shape.num_experts))
    return np.argsort(-score_TE, 1)[:, : shape.k].astype(np.int32)


def _bound(shape: Shape, rows: int) -> dict[str, Callable[[], Any]]:
    """One expert's product over so many rows, on one device, which here has all cores."""
    D, F = shape.d_model, shape.d_ff
    x_RD, gate_DF, up_DF, down_FD = (
        jax.random.normal(jax.random.key(i), s) * 0.05 for i, s in enumerate(((rows, D), (D, F), (D, F), (F, D))))

    def dense(x_RD, gate_DF, up_DF, down_FD):
        return (jax.nn.silu(x_RD @ gate_DF) * (x_RD @ up_DF)) @ down_FD

    once = jax.jit(dense)
    both = jax.jit(jax.grad(lambda *a: (dense(*a) ** 2).sum(), (0, 1, 2, 3)))
    args = (x_RD, gate_DF, up_DF, down_FD)
    return {"forward_bound": lambda: once(*args), "both_bound": lambda: both(*args)}
