"""No overlap: one task after the other, in the order of the block.

    compute  attention route pack          experts        unpack
    links                         dispatch         combine         (gradients at the end)

What others are compared with. It changes no value and forces nothing but the order.
"""

from __future__ import annotations

from .base import Orders, Schedule, by, only_one

ORDERS = Orders(by(lambda task: ()), by(lambda task: (task.verb == "grad_reduce",)))


SCHEDULE = Schedule("sequential", (ORDERS,), only_one, tied=False)
