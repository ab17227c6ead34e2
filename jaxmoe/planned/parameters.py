"""Parameters as tasks: gathered and made varying once, so that gradients are reduced where the plan says."""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ..collectives import Counters, added, all_gather, all_reduce, no_counters, reduce_scatter
from ..collectives.compressed import cut, joined
from ..compat import vary_over
from ..plan.block import CODED_GROUPS, Block, Param
from ..plan.execute import Verb
from ..plan.tasks import Task, codec_of, family
from ..types import Axes

Pieces = dict[str, tuple[Param, jax.Array]]
Name = TypeVar("Name")


def parameter_verbs(block: Block) -> dict[str, Verb]:
    by_name = {p.name: p for p in block.params}
    everywhere = tuple(a for a, _ in block.axes)

    def gather(task: Task, reads, consts):
        params = [by_name[v.partition("@")[0].removeprefix("p:")] for v in task.reads]
        codec, counters = codec_of(task), []
        if codec is None:
            found = [gathered(w, p, block) for p, w in zip(params, reads, strict=True)]
        else:
            found, counters = whole(list(zip(params, reads, strict=True)), codec, block)
        return vary_over((*found, *_counted(task, counters)), everywhere)

    def reduce(task: Task, reads, consts):
        pending = dict(zip(task.reads, reads, strict=True))
        names = [v for v in task.writes if v.startswith("g:")]
        done, counters = reduced({v: _piece(v, pending, by_name) for v in names}, codec_of(task), block)
        return (*(done[v] for v in names), *vary_over(_counted(task, counters), everywhere))

    coded = dict(block.codec)
    return {"param_gather": Verb(gather, holds_collectives="parameters" in coded),
            "grad_reduce": Verb(reduce, holds_collectives="gradients" in coded)}


def _piece(name: str, pending: dict[str, jax.Array], by_name: dict[str, Param]) -> tuple[Param, jax.Array]:
    """name: "g:parameter.lo.hi@layer"."""
    stem, at, layer = name.removeprefix("g:").partition("@")
    param_name, lo, hi = stem.rsplit(".", 2)
    param, g = by_name[param_name], pending[f"pending:{param_name}{at}{layer}"]
    return param, g[int(lo):int(hi)] if param.shape and not param.gather else g


def _counted(task: Task, counters: list[Counters]) -> tuple[Counters, ...]:
    """What the task writes of its collectives' counters."""
    return (added(no_counters(), *counters),) if any(family(v) == "counted" for v in task.writes) else ()


def gathered(w: jax.Array, param: Param, block: Block) -> jax.Array:
    """A parameter gathered over the axes that store it; in bfloat16, if it is used in no other type."""
    sent = w.astype(jnp.bfloat16) if block.bytes_per_value == 2 and param.group in CODED_GROUPS else w
    return all_gather(sent, param.gather, param.gather_dim).astype(w.dtype)


def whole(params: list[tuple[Param, jax.Array]], codec: str, block: Block) -> tuple[list[jax.Array], list[Counters]]:
    """As `gathered`, in one message a set of axes."""
    found, counters = [w for _, w in params], []
    for axes, places in grouped({i: p.gather for i, (p, _) in enumerate(params)}).items():
        part_N, back = ravel_pytree([found[i].astype(jnp.bfloat16) for i in places])
        part_PN, counts = all_gather(part_N[None], axes, 0, codec, codec_axes=block.stages(axes)[1], counters=True)
        for i, y in zip(places, jax.vmap(back)(part_PN), strict=True):
            found[i] = joined(y, params[i][0].gather_dim).astype(found[i].dtype)
        counters.append(counts)
    return found, counters


def reduced(pieces: Pieces, codec: str | None, block: Block) -> tuple[dict[str, jax.Array], list[Counters]]:
    """Each piece's sum over the devices that hold its parameter, in one message a set of axes: of several, XLA leaves
    in line what exceeds its limit of collectives in flight."""
    found, counters = {name: g for name, (_, g) in pieces.items()}, []
    for axes, names in grouped({n: p.gather for n, (p, _) in pieces.items()}).items():
        parts = {n: cut(found[n], axes, pieces[n][0].gather_dim) for n in names}
        back = ravel_pytree(jax.tree.map(lambda a: a[0], parts))[1]
        g_PN = jax.vmap(lambda tree: ravel_pytree(tree)[0])(parts)
        g_PN, counts = reduce_scatter(g_PN, axes, 0, codec, codec_axes=block.stages(axes)[1], counters=True)
        found |= back(g_PN[0])
        counters.append(counts)
    for axes, names in grouped({n: p.reduce for n, (p, _) in pieces.items()}).items():
        vector, back = ravel_pytree({n: found[n] for n in names})
        vector, counts = all_reduce(vector, axes, codec, codec_axes=block.stages(axes)[1], counters=True)
        found |= back(vector)
        counters.append(counts)
    return found, counters


def grouped(axes: Mapping[Name, Axes]) -> dict[Axes, list[Name]]:
    """Names by their axes, without those that have none."""
    found: dict[Axes, list[Name]] = {}
    for name, some in axes.items():
        if some:
            found.setdefault(some, []).append(name)
    return found
