"""Parameters as tasks: gathered and made varying once, so that gradients are reduced where the plan says."""

import jax

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
        return tuple(_reduced_piece(v, pending, by_name) for v in task.writes)

    return {"param_gather": Verb(gather), "grad_reduce": Verb(reduce)}


def _reduced_piece(name: str, pending: dict[str, jax.Array], by_name: dict[str, Param]) -> jax.Array:
    """name: "g:parameter.lo.hi@layer"."""
    stem, at, layer = name.removeprefix("g:").partition("@")
    param_name, lo, hi = stem.rsplit(".", 2)
    param, g = by_name[param_name], pending[f"pending:{param_name}{at}{layer}"]
    if param.gather:
        return psum(reduce_scatter(g, param.gather, param.gather_dim), param.reduce)
    return psum(g[int(lo):int(hi)] if param.shape else g, param.reduce)
