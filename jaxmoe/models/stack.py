"""Running a stack of blocks, layer by layer or as a scan over stacked parameters, and going between the two.

A stack is a list of blocks. Unrolled, it has one block a layer. Scanned, it has the blocks of one group of layers, and
each of their arrays has a leading dim over the groups: layer = group index * blocks + index of the block.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

REMAT: dict[str, Callable] = {
    "none": lambda run: run,
    "full": jax.checkpoint,
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


def unrolled(blocks, remat: str, x_BSD, context, cache: Sequence, keys: Sequence):
    """x_BSD, aux with a leading dim over the MoE layers (None if there are none), and the cache, block by block."""
    every_aux, new_cache = [], []
    for block, kv, key in zip(blocks, cache, keys, strict=True):
        graph, state = nnx.split(block)
        run = REMAT[remat](partial(_apply, graph))
        x_BSD, aux, kv = run(state, x_BSD, context, kv, key)
        every_aux += [] if aux is None else [aux]
        new_cache.append(kv)
    aux_L = jax.tree.map(lambda *leaves: jnp.stack(leaves), *every_aux) if every_aux else None
    return x_BSD, aux_L, tuple(new_cache)


def _apply(graph, state, *args):
    return nnx.merge(graph, state)(*args)


def scanned(blocks, remat: str, x_BSD, context, cache: Sequence, keys: Sequence):
    """As `unrolled`, one group of layers a scan step: compile time does not grow with the number of groups."""
    graph, state = nnx.split(blocks)

    def group(x_BSD, per_group):
        state, cache, keys = per_group
        x_BSD, aux_L, cache = unrolled(nnx.merge(graph, state), remat, x_BSD, context, cache, keys)
        return x_BSD, (aux_L, cache)

    x_BSD, (aux_NL, cache) = jax.lax.scan(group, x_BSD, (state, tuple(cache), tuple(keys)))
    return x_BSD, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), aux_NL), cache


def stacked(layers: Sequence, group: int, mesh: Mesh | None) -> nnx.List:
    """The scanned stack of these layers, `group` of them a step; sharded as they are."""
    return nnx.List([_stack_blocks(layers[j::group], mesh) for j in range(group)])


def _stack_blocks(layers: Sequence, mesh: Mesh | None):
    variables = [[v for _, v in _variables(layer)] for layer in layers]
    block = nnx.clone(layers[0])
    for (_, target), *sources in zip(_variables(block), *variables, strict=True):
        spec = P(None, *target.get_metadata("spec", P()))
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        target.set_value(jax.jit(lambda *a: jnp.stack(a), out_shardings=sharding)(*(v[...] for v in sources)))
        target.set_metadata("spec", spec)
    return block


def unstacked(blocks) -> list:
    """The layers of a scanned stack, in order, as blocks of their own."""
    groups = len(_variables(blocks[0])[0][1][...])
    return [_pick(block, n) for n in range(groups) for block in blocks]


def _pick(block, n: int):
    block = nnx.clone(block)
    for _, variable in _variables(block):
        variable.set_value(variable[...][n])
        variable.set_metadata("spec", P(*variable.get_metadata("spec", P(None))[1:]))
    return block


def _variables(module) -> list:
    """(path, variable) of all variables, in a fixed order."""
    return [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)]
