"""Model and optimizer as shapes and shardings, for compiling without allocating anything."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..models.decoder import DecoderLM
from ..plan.plan import Plan
from .step import make_optimizer


def abstract_state(cfg: Any, mesh: Mesh, plan: Plan | None) -> tuple[Any, Any]:
    """(graph, state) of (model, optimizer), as `nnx.split` gives them, of shapes with shardings on mesh."""
    key = jax.random.key(0)

    def make() -> tuple[DecoderLM, nnx.Optimizer]:
        model = DecoderLM(cfg, mesh, rngs=nnx.Rngs(key))
        model.plan = plan
        return model, nnx.Optimizer(model, make_optimizer(cfg), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(make))
    specs = {_names(path)[1:]: v.get_metadata("spec", P()) for path, v in nnx.to_flat_state(state) if path[0] == 0}

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        names = _names(path)
        spec = next((specs[names[i:]] for i in range(len(names)) if names[i:] in specs), P())
        fits = len(spec) <= leaf.ndim
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec if fits else P()))

    return graph, jax.tree_util.tree_map_with_path(place, state)


def _names(path: Any) -> tuple[str, ...]:
    """Keys of a path, whatever kind of container each belongs to; a variable's own "value" left out."""
    names = tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
    return tuple(n for n in names if n not in ("value", "raw_value", "_value"))
