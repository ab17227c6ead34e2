"""Mast: attention and MoE tasks of a segment in one order, found by search. (abstract; graph and search are ours)

    inter    D0 D1    D2 D3    C0 C1    C2 C3
    compute  A0 A1 E0 E1 A2 A3 E2 E3 U0 U1 ...        (one possible order; W are weight gradients, free to move)
    backward    C1 C0 [G]  ...   U  dE1 W1 dE0 W1 W0 dA W

A job shop on compute and two links. Attention is cut along the batch where chunks are (`chunk="batch"`), so that it
waits for its own chunk only. Weight-gradient products feed nothing but reductions one segment later: they fill what is
idle. Orders tried: PipeMoE's loops, FSMoE's with its slices of gradients, the same with weight gradients last, and
list scheduling by longest path; the best is improved by moving single tasks; of orders within 2 % the one that loses
least if XLA leaves untied collectives in line is taken. Degrees and slices by simulation. No value changes. The gap to
the bound is in the plan's timeline (`Timeline.bound_seconds`).
It wins where attention or weight gradients are long enough to hide what MoE alone cannot.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..orders import Order, list_order
from ..tasks import Pass, Task
from . import fsmoe, pipemoe
from .base import SLICES, Orders, Schedule, all_degrees, by


def weights_last(pass_: Pass, seconds: Mapping[str, float]) -> tuple[str, ...]:
    """FSMoE's order with a layer's weight gradients behind all its other tasks."""
    return fsmoe.placed(pass_, seconds, _weights_last)


def _weights_last(task: Task) -> tuple:
    if task.direction == "weight_grad":
        return (1, -task.layer, 3)
    return pipemoe.backward(task)


FORWARD: tuple[Order, ...] = (by(pipemoe.forward), list_order)
BACKWARD: tuple[Order, ...] = (by(pipemoe.backward), fsmoe.backward, weights_last, list_order)
ORDERS = tuple(Orders(f, b) for f in FORWARD for b in BACKWARD)


SCHEDULE = Schedule("mast", ORDERS, all_degrees, SLICES, refined=True)
