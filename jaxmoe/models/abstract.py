"""A config's model as shapes and shardings, without allocating anything."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from .decoder import DecoderLM

Parameters = dict[str, tuple[jax.ShapeDtypeStruct, P]]


def abstract_model(cfg: Any, mesh: AbstractMesh) -> Any:
    """The model; its variables hold shapes."""
    key: Any = jax.random.key(0)
    return nnx.eval_shape(lambda: DecoderLM(cfg, mesh, rngs=nnx.Rngs(key)))  # type: ignore[arg-type]


def abstract_parameters(cfg: Any, mesh: AbstractMesh) -> Parameters:
    """Path, joined by dots, -> (shape and type of the global array, sharding)."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(abstract_model(cfg, mesh), nnx.Param)):
        spec = variable.get_metadata().get("spec")
        assert spec is not None, f"parameter {path} was not made by jaxmoe.parameters"
        found[".".join(map(str, path))] = (variable.get_value(), spec)
    return found


def stored_size(leaf: jax.ShapeDtypeStruct, spec: P, mesh: AbstractMesh) -> float:
    """Values of a parameter that one device stores."""
    parts = [part if isinstance(part, tuple) else (part,) for part in tuple(spec)]
    return prod(leaf.shape) / prod(mesh.shape[a] for part in parts for a in part if a is not None)
