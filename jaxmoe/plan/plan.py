"""The plan of a segment of blocks: which tasks it is cut into, and their order.

A plan is data. It names tasks of a graph that follows from its block (`Plan.graph`), in the order in which they are
issued; each stream serves its own tasks in that order. It is executed, simulated, searched for and proven, and no
reader knows how it came about.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .block import Block
from .graph import task_graph
from .tasks import Degrees, Span, TaskGraph

PLAN_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Which tasks a segment of blocks is cut into, and their order.

    schedule: where it came from, for people. block: shapes, roles and layers .
    forward, backward: issue order. forward_spans, backward_spans: what flies beside what. saved: values kept for the
    backward pass, which recomputes all others that it needs. slices: pieces of the dense gradient's reduction.
    barriers: False gives the same tasks to XLA without an order, for comparison.

    Example: ``made = jaxmoe.plan(jaxmoe.load_config("configs/mixtral-8x7b-8x8-h100.toml")); assert
    jaxmoe.Plan.from_json(made.to_json()) == made``
    """

    schedule: str
    block: Block
    degrees: Degrees
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    forward_spans: tuple[Span, ...] = ()
    backward_spans: tuple[Span, ...] = ()
    saved: tuple[str, ...] = ()
    slices: int = 1
    barriers: bool = True

    @cached_property
    def graph(self) -> TaskGraph:
        return task_graph(self.block, self.degrees, self.saved, self.slices)

    def check(self) -> Plan:
        """self, if it can run; otherwise ValueError names the tasks."""
        g = self.graph
        for pass_, order, spans, what in ((g.forward, self.forward, self.forward_spans, "forward"),
                                          (g.backward, self.backward, self.backward_spans, "backward")):
            pass_.check_order(order, what)
            pass_.check_spans(order, spans, what)
        return self

    def to_json(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tree = {"version": PLAN_VERSION, **{k: _plain(v) for k, v in fields.items()}}
        return json.dumps(tree, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError for what is not a plan of this version, or cannot run."""
        try:
            tree = json.loads(text)
        except json.JSONDecodeError as e:
            raise ValueError(f"a plan must be JSON: {e}") from None
        if not isinstance(tree, dict) or tree.get("version") != PLAN_VERSION:
            got = tree.get("version") if isinstance(tree, dict) else type(tree).__name__
            raise ValueError(f"plan version must be {PLAN_VERSION}, got {got!r}")
        tree.pop("version")
        known = {f.name for f in dataclasses.fields(Plan)}
        if set(tree) - known:
            raise ValueError(f"a plan has no key {sorted(set(tree) - known)[0]!r}; known: {', '.join(sorted(known))}")
        try:
            tree |= {"block": Block.from_tree(tree["block"]), "degrees": Degrees(**tree["degrees"])}
            for key in ("forward_spans", "backward_spans"):
                tree[key] = tuple(Span(**s) for s in tree.get(key, ()))
            for key in ("forward", "backward", "saved"):
                tree[key] = tuple(tree.get(key, ()))
            plan = Plan(**tree)
        except (KeyError, TypeError) as e:
            raise ValueError(f"a plan lacks a key or has one too many: {e}") from None
        return plan.check()


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
