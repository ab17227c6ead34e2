"""Reading and writing pieces of what tasks of other degrees made."""

import jax
import jax.numpy as jnp

from ..experts import ExpertWeights
from ..plan.tasks import Task, family


def by_family(names: tuple[str, ...], values: tuple) -> dict[str, list]:
    """Values of each family, in order."""
    found: dict[str, list] = {}
    for name, value in zip(names, values, strict=True):
        found.setdefault(family(name), []).append(value)
    return found


def expert_weights(values: dict[str, list], prefix: str = "") -> ExpertWeights:
    """Those that a task reads; None where it does not."""
    up, down, gate = (values.get(prefix + name, [None])[0] for name in ("w_up_EDF", "w_down_EFD", "w_gate_EDF"))
    return ExpertWeights(up, down, gate)  # type: ignore[arg-type]


def part_of(task: Task) -> int:
    """Part of the tokens that a task works on."""
    return int(task.name.partition("@")[0].split(".")[1])


def piece(chunks: list[jax.Array], part: int, parts: int, others: int, dim: int) -> jax.Array:
    """Piece `part` of `parts`, from those of `others` equal pieces that overlap it."""
    whole = chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, dim)
    if others >= parts:
        return whole
    within = parts // others
    return jnp.split(whole, within, dim)[part % within]


def piece_gradient(g: jax.Array, part: int, parts: int, others: int, dim: int) -> list[jax.Array]:
    """Cotangents of the chunks that `piece` took."""
    if others >= parts:
        return jnp.split(g, others // parts, dim)
    within = parts // others
    zeros = jnp.zeros_like(g)
    return [jnp.concatenate([g if i == part % within else zeros for i in range(within)], dim)]
