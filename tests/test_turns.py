"""On CPU no collective may run beside a loop or a conditional that holds some: see `jaxmoe.collectives.turns`."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_planned import MESHES, config, loss_and_gradients, mesh_of
from test_schedules import schedule

from jaxmoe.collectives import after, turn
from jaxmoe.config import from_dict
from jaxmoe.models import DecoderLM
from jaxmoe.planning import plan
from jaxmoe.spec import Spec

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\((.*)$")
NAME = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")


def overlaps(text):
    """Pairs of names, of a loop or conditional with collectives, and of what may run beside it and meets under the same
    key: neither needs the other's result. text: a compiled program."""
    computations, lines = {}, []
    for line in text.splitlines():
        if name := NAME.match(line):
            lines = computations[name[1]] = []
        elif found := INSTRUCTION.match(line):
            lines.append((found[1], found[2], set(re.findall(r"%([\w.\-]+)", found[3]))))
            if found[2] in COLLECTIVES:
                lines[-1] = (*lines[-1][:2], lines[-1][2] | {(re.search(r"channel_id=\d+", line) or "=none")[0]})

    @cache
    def keys(computation):
        return frozenset().union(*(keys_of(*line) for line in computations[computation]))

    def keys_of(name, operation, refers):
        own = {r for r in refers if "=" in r}
        return own.union(*(keys(r) for r in refers if r in computations))

    pairs = []
    for lines in computations.values():
        meets = {line[0]: keys_of(*line) for line in lines}
        holders = [n for n, operation, _ in lines if meets[n] and operation not in COLLECTIVES]
        needs = {}
        for name, _, refers in lines if holders else ():
            needs[name] = frozenset().union(*(needs[r] | {r} for r in refers if r in needs))
        pairs += [(h, n) for h in holders for n in meets
                  if n != h and meets[n] & meets[h] and n not in needs[h] and h not in needs[n]]
    return pairs


def compiled(place, layout, layers, kind=None, **sections):
    cfg = config(place, layout, layers, None if kind is None else dict(kind))
    cfg = from_dict(cfg.model_dump(exclude_unset=True) | sections)
    dtype = jnp.bfloat16 if "codec" in sections else jnp.float32
    model = DecoderLM(cfg, mesh_of(MESHES[place][0]), nnx.Rngs(0), dtype)
    if kind is not None:
        model.plan = plan(cfg, "cpu-8")
    tokens = jnp.zeros((16, 16), int)
    return loss_and_gradients.lower(model, tokens, tokens == 0, tokens).compile().as_text()


SEQUENCES = ("expert", "ragged", 4, schedule("sp-moe", 4, 4, 2, slices=2))
CODED = {"codec": {"kind": "x3p"}, "train": {"precision": "bfloat16", "batch": 16}}


def test_without_turns_collectives_overlap(monkeypatch):
    assert not overlaps(compiled("expert", "ragged", 2))
    monkeypatch.setattr(Spec, "in_turn", False)
    jax.clear_caches()
    assert overlaps(compiled("expert", "ragged", 2))
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "sections"), [
    (("all", "ragged", 2), {}), (SEQUENCES, {}),
    (("all", "slots", 4, schedule("pipemoe", 2, 2, slices=2)), CODED),
    (("all", "ragged", 4, schedule("pipemoe", 2, 2, slices=2)), CODED),
    (("all", "slots", 2, schedule("fsmoe", 2, 2, slices=2)), CODED),
], ids=["unplanned", "sequences", "coded slots", "coded ragged", "coded at once"])
def test_collectives_take_turns(case, sections):
    assert not overlaps(compiled(*case, **sections))


def test_waiting_changes_no_bit():
    values = {"a": jnp.array([-0.0, jnp.nan, jnp.inf, 1e-45]), "b": jnp.arange(3, dtype=jnp.uint8),
              "c": jnp.array(True)}
    for earlier in (jnp.nan, 1.0):
        wait = jax.jit(lambda v, e: after(v, turn((e, jnp.ones((2, 2)), jnp.zeros((0,))))))
        waited = wait(values, jnp.float32(earlier))
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), values, waited)
        assert all(jax.tree.leaves(same))
