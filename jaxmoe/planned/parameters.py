"""Parameters as tasks: gathered and made varying once, so that gradients are reduced where the plan says."""

import jax
from jax.flatten_util import ravel_pytree

from ..collectives import all_gather, psum, reduce_scatter
from ..compat import vary_over
from ..plan.block import Block, Param
from ..plan.execute import Verb
from ..plan.tasks import Task


def parameter_verbs(block: Block) -> dict[str, Verb]:
    by_name = {p.name: p for p in block.params}
    everywhere = tuple(a for a, _ in block.axes)

    def gather(task: Task, reads, consts):
        params = [by_name[v.partition("@")[0].removeprefix("p:")] for v in task.reads]
        return tuple(vary_over(all_gather(w, p.gather, p.gather_dim), everywhere)
                     for p, w in zip(params, reads, strict=True))

    def reduce(task: Task, reads, consts):
        pending = dict(zip(task.reads, reads, strict=True))
        done = reduced({v: _piece(v, pending, by_name) for v in task.writes})
        return tuple(done[v] for v in task.writes)

    return {"param_gather": Verb(gather), "grad_reduce": Verb(reduce)}


SMALL = 2**18   # values; smaller pieces are reduced together


def _piece(name: str, pending: dict[str, jax.Array], by_name: dict[str, Param]) -> tuple[Param, jax.Array]:
    """name: "g:parameter.lo.hi@layer"."""
    stem, at, layer = name.removeprefix("g:").partition("@")
    param_name, lo, hi = stem.rsplit(".", 2)
    param, g = by_name[param_name], pending[f"pending:{param_name}{at}{layer}"]
    return param, g[int(lo):int(hi)] if param.shape and not param.gather else g


def reduced(pieces: dict[str, tuple[Param, jax.Array]]) -> dict[str, jax.Array]:
    """Each piece's sum over the devices that hold its parameter; small ones in one all-reduce a set of axes."""
    found, small = {}, {}
    for name, (param, g) in pieces.items():
        if param.gather:
            found[name] = psum(reduce_scatter(g, param.gather, param.gather_dim), param.reduce)
        elif g.size > SMALL:
            found[name] = psum(g, param.reduce)
        else:
            small.setdefault(param.reduce, {})[name] = g
    for axes, group in small.items():
        vector, back = ravel_pytree(group)
        found |= back(psum(vector, axes))
    return found
