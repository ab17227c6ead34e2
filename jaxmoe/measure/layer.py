"""Time of the MoE layer beside its bound: one plain dense SwiGLU product over as many rows as the layout holds."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..dispatch import Ragged, Slots
from ..layer import MoE
from ..mesh import Roles
from ..routing import TopK


def seconds_of(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turns so that a noisy machine disturbs all alike."""
    for f in functions.values():
        jax.block_until_ready(f())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, f in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(f())
            times[name].append(time.perf_counter() - start)
    return {name: median(t) for name, t in times.items()}


def dense(x_RD, gate_DF, up_DF, down_FD):
    return (jax.nn.silu(x_RD @ gate_DF) * (x_RD @ up_DF)) @ down_FD


def bench_layer(tokens: int, d_model: int, d_ff: int, num_experts: int, k: int, repeats: int) -> list[dict[str, Any]]:
    """One row a layout; expert parallelism over all devices, float32."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("device",), axis_types=(AxisType.Auto,))
    roles = Roles(data=("device",), expert=("device",))
    x_BSD = jax.device_put(jax.random.normal(jax.random.key(0), (count, tokens // count, d_model)),
                           NamedSharding(mesh, P("device")))
    rows = []
    for name, dispatch in (("slots", Slots(1.0)), ("ragged", Ragged())):
        moe = MoE(d_model, d_ff, num_experts, router=TopK(k), dispatch=dispatch, mesh=mesh, roles=roles,
                  rngs=nnx.Rngs(0))
        graph, state = nnx.split(moe)
        slots = isinstance(dispatch, Slots) and num_experts * dispatch.capacity(k, tokens // count, num_experts) * count
        held = slots or tokens * k
        x_RD = jax.device_put(jax.random.normal(jax.random.key(1), (held, d_model)), NamedSharding(mesh, P("device")))
        w = [jax.device_put(v, NamedSharding(mesh, P()))
             for v in (jnp.ones((d_model, d_ff)), jnp.ones((d_model, d_ff)), jnp.ones((d_ff, d_model)))]
        layer = lambda s, x, graph=graph: nnx.merge(graph, s)(x)[0]  # noqa: E731
        forward, plain = jax.jit(layer), jax.jit(dense)
        both = jax.jit(jax.value_and_grad(lambda s, x, layer=layer: layer(s, x).sum(), (0, 1)))
        bound = jax.jit(jax.value_and_grad(lambda w, x: dense(x, *w).sum(), (0, 1)))
        times = seconds_of({
            "forward": lambda f=forward, s=state: f(s, x_BSD), "forward_bound": lambda f=plain, w=w, x=x_RD: f(x, *w),
            "both": lambda f=both, s=state: f(s, x_BSD), "both_bound": lambda f=bound, w=w, x=x_RD: f(w, x),
        }, repeats)
        rows.append({
            "dispatch": name, "rows": held, "forward_seconds": times["forward"],
            "forward_bound_seconds": times["forward_bound"], "forward_backward_seconds": times["both"],
            "bound_seconds": times["both_bound"], "ratio": times["both"] / times["both_bound"],
            "tokens_per_second": tokens / times["both"],
        })
    return rows
