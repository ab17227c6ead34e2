"""The real train step, compiled for a cluster that is not there, against its plan."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .mesh import roles_of
from .plan.cluster import Cluster, load_cluster
from .plan.prove import Report, compile_options, judge, read, target_devices
from .plan.tasks import Plan
from .planning import plan as make_plan


def prove(cfg: Any, cluster: Cluster | str, plan: Plan | None = None) -> Report:
    """Compile the train step of cfg for the cluster's GPUs, which need not be there, and compare it with the plan.

    plan: None = the one that cfg asks for. The batch, the mesh and its size are cfg's. Raises ValueError if the mesh is
    not the cluster's size, or if the compiler is missing.

    Example: ``report = jaxmoe.prove(cfg, "8x8-h100"); print(report.table, report.missing)``
    """
    cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    plan = plan or make_plan(cfg, cluster)
    mesh = target_mesh(cfg, cluster)
    compiled = lowered_step(cfg, mesh, plan).compile(compiler_options=compile_options(plan))
    return judge(plan, read(compiled.as_text()), cluster, peak_bytes(compiled))


def peak_bytes(compiled: Any) -> int:
    """Arguments, outputs that are not arguments, and temporaries of a compiled program on one device."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def target_mesh(cfg: Any, cluster: Cluster) -> Mesh:
    """The config's mesh of the cluster's devices."""
    sizes = dict(cfg.mesh.axes)
    devices = cluster.num_devices
    known = math.prod(s for s in sizes.values() if s != -1)
    sizes = {a: devices // known if s == -1 else s for a, s in sizes.items()}
    if math.prod(sizes.values()) != devices:
        raise ValueError(f"mesh.axes: the product of {sizes} must be the {devices} devices of cluster "
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
