"""No overlap: one task after the other, in the order of the block.

    compute  attention route pack          experts        unpack
    links                         dispatch         combine         (gradients at the end)

What others are compared with. It changes no value and forces nothing but the order.
"""

from __future__ import annotations

from ..block import SAVED, Block
from ..cluster import Cluster
from ..plan import Plan
from ..tasks import Degrees
from .base import Choice, Orders, Trials, by

ORDERS = Orders(by(lambda task: ()), by(lambda task: (task.verb == "grad_reduce",)))


def plan(block: Block, cluster: Cluster, degrees: Degrees | None = None, slices: int | None = None,
         saved: tuple[str, ...] = SAVED) -> Plan:
    """One chunk, unless degrees are given."""
    choice = Choice(degrees or Degrees(), ORDERS, slices or 1)
    return Trials(block, cluster, saved).plan("sequential", choice, tied=False)
