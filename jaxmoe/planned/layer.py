"""One MoE layer run as a plan says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from ..dispatch import Slots
from ..experts import ExpertWeights
from ..plan.cluster import load_cluster
from ..plan.execute import Verbs, stack
from ..plan.plan import Plan
from ..plan.search import PLANNERS
from ..spec import Spec
from ..types import Groups
from .blocks import moe_block
from .exchange import metrics_of
from .moe import MoEVerbs
from .parameters import parameter_verbs
from .ragged import RaggedLayout
from .shared_slots import with_group
from .slots import SlotsLayout


def moe_verbs(plan: Plan, spec: Spec, groups: Groups, norm_eps: float | None = None) -> Verbs:
    """The verb table of MoE layers. norm_eps: of the norm before routing, in blocks with attention."""
    layouts = SlotsLayout if isinstance(spec.dispatch, Slots) else RaggedLayout
    layout = layouts(plan.block, plan.degrees, spec)
    moe = MoEVerbs(plan.block, plan.degrees, spec, groups, layout, norm_eps)
    return moe.table() | layout.table() | parameter_verbs(plan.block)


def planned_layer(
    plan: Plan, spec: Spec, groups: Groups, router: dict[str, jax.Array], bias_E, key, w: ExpertWeights,
    by_token: dict[str, jax.Array],
) -> tuple[jax.Array, Any]:
    """One device's part of a layer, inside shard_map: as the unplanned one, in value and gradient."""
    B, S, _ = by_token["x"].shape
    if (plan.block.batch, plan.block.seq, plan.block.attention) != (B, S, False):
        raise ValueError(f"schedule: the plan is for {plan.block.batch} sequences of {plan.block.seq} tokens on a "
                         f"device{', with attention' if plan.block.attention else ''}; the layer got {B} of {S}")
    params = {f"router_{n}": a for n, a in router.items()}
    params |= {"w_up_EDF": w.up_EDF, "w_down_EFD": w.down_EFD}
    if w.gate_EDF is not None:
        params["w_gate_EDF"] = w.gate_EDF
    consts = with_group({n: a for n, a in by_token.items() if n != "x"}, plan.block)
    layered = {n: a[None] for n, a in (("bias", bias_E), ("key", key)) if a is not None}
    run = stack(plan, moe_verbs(plan, spec, groups), spec.in_turn)
    x_BSD = by_token["x"]
    y_BSD, aux, counted = run(x_BSD, jax.tree.map(lambda a: a[None], params), consts, layered)
    aux = aux._replace(metrics=aux.metrics | metrics_of(counted))
    return y_BSD.astype(x_BSD.dtype), jax.tree.map(lambda a: a[0], aux)


@lru_cache(maxsize=64)
def layer_plan(schedule: str, spec: Spec, batch: int, sequence: int, cluster: str = "8x8-h100") -> Plan:
    """The plan of one MoE layer for a global batch [batch, sequence]."""
    if schedule not in PLANNERS:
        raise ValueError(f"schedule must be None, a Plan or one of {', '.join(PLANNERS)}, got {schedule!r}")
    costs = load_cluster(cluster)
    return PLANNERS[schedule](moe_block(spec, batch, sequence, links=dict(costs.links)), costs)
