"""No overlap: one task after the other, in the order of the block.

    compute  attention route pack          experts        unpack
    links                         dispatch         combine         (gradients at the end)

What others are compared with. It changes no value and forces nothing but the order.
"""

from __future__ import annotations

from ..block import Block
from ..cluster import Cluster
from ..tasks import Degrees, Plan
from .base import Orders, build

ORDERS = Orders(lambda task: (), lambda task: (task.verb == "grad_reduce",))


def plan(block: Block, cluster: Cluster, degrees: Degrees | None = None, **options) -> Plan:
    """One chunk, unless degrees are given."""
    return build("sequential", block, cluster, ORDERS, degrees or Degrees(), tied=False, **options)
