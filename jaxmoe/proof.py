"""The real train step, compiled for a cluster that is not there, against its plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .experts import ExpertWeights
from .layer import apply
from .mesh import axis_sizes, roles_of
from .plan.cluster import Cluster, as_cluster
from .plan.plan import Plan
from .plan.prove import Report, compile_options, judge, read, target_devices
from .planning import plan as make_plan
from .spec import Spec


def prove(cfg: Any, cluster: Cluster | str, plan: Plan | None = None) -> Report:
    """Compile the train step of cfg for the cluster's GPUs, which need not be there, and compare it with the plan.

    plan: None = the one that cfg asks for. The batch, the mesh and its size are cfg's. Raises ValueError if the mesh is
    not the cluster's size, or if the compiler is missing.

    Example: ``print(jaxmoe.prove(jaxmoe.load_config("configs/mixtral-8x7b-8x8-h100.toml"), "8x8-h100").text)``
    """
    cluster = as_cluster(cluster)
    plan = plan or make_plan(cfg, cluster)
    mesh = target_mesh(cfg, cluster)
    compiled = lowered_step(cfg, mesh, plan).compile(compiler_options=compile_options(plan))
    return judge(plan, read(compiled.as_text() or ""), cluster, peak_bytes(compiled))


def prove_layer(spec: Spec, batch: int, sequence: int, cluster: Cluster | str, plan: Plan) -> Report:
    """As `prove`, for the value and gradient of one MoE layer on a global batch [batch, sequence].

    spec: with a mesh of axes and sizes only; its product must be the cluster's devices.
    """
    cluster = as_cluster(cluster)
    assert spec.mesh is not None
    mesh = _mesh_of(dict(spec.mesh.shape), cluster)
    spec = replace(spec, mesh=mesh)
    e, roles = spec.expert_specs, spec.roles

    def shape(sizes: tuple[int, ...], p: Any = P(), dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, p))

    D, F, E = spec.d_model, spec.d_ff, spec.num_experts
    gate = None if e.gate_EDF is None else shape((E, D, F), e.gate_EDF)
    weights = ExpertWeights(shape((E, D, F), e.up_EDF), shape((E, F, D), e.down_EFD), gate)
    router = {n: shape(w.shape) for n, w in spec.router.weights(D, E).items()}
    x_BSD = shape((batch, sequence, D), P(roles.batch_axes, roles.sequence_axes), spec.dtype)

    def loss(router, weights, x_BSD):
        y_BSD, aux = apply(spec, router, weights, x_BSD, schedule=plan)
        return (y_BSD.astype(jnp.float32) ** 2).sum() + sum(aux.losses.values())

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(router, weights, x_BSD)
    compiled = lowered.compile(compiler_options=compile_options(plan))
    return judge(plan, read(compiled.as_text() or ""), cluster, peak_bytes(compiled))


def peak_bytes(compiled: Any) -> int:
    """Arguments, outputs that are not arguments, and temporaries of a compiled program on one device."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def target_mesh(cfg: Any, cluster: Cluster) -> Mesh:
    """The config's mesh of the cluster's devices."""
    return _mesh_of(axis_sizes(cfg.mesh.axes, cluster.num_devices), cluster)


def _mesh_of(sizes: dict[str, int], cluster: Cluster) -> Mesh:
    if math.prod(sizes.values()) != cluster.num_devices:
        raise ValueError(f"mesh.axes: the product of {sizes} must be the {cluster.num_devices} devices of cluster "
                         f"{cluster.name!r}, got {math.prod(sizes.values())}")
    return Mesh(np.array(target_devices(cluster)).reshape(tuple(sizes.values())), tuple(sizes),
                axis_types=(AxisType.Auto,) * len(sizes))


def lowered_step(cfg: Any, mesh: Mesh, plan: Plan | None) -> Any:
    """The train step lowered for a mesh, from shapes alone."""
    from .training.abstract import abstract_state
    from .training.step import step_function

    graph, state = abstract_state(cfg, mesh, plan)
    shape = (cfg.train.batch, cfg.model.seq + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P(roles_of(cfg).batch_axes)))
    return jax.jit(step_function(cfg, graph), donate_argnums=0).lower(state, tokens)
