"""FSMoE's two testbeds in its code's own terms (read): seconds, elements of 4 bytes, multiply-adds.

Each time is alpha + beta * n. n: operand of an All-to-All or all-reduce, gathered tensor of a gather or scatter,
multiply-adds of the experts. `configs/clusters/fsmoe-{a,b}.toml` hold the same facts as cluster files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Linear:
    """seconds(n) = alpha + beta n; `parts` pieces of it take alpha + beta n / parts each."""

    alpha: float
    beta: float

    def seconds(self, n: np.ndarray | float, parts: int = 1) -> np.ndarray:
        return np.asarray(self.alpha + self.beta * n / parts)


@dataclass(frozen=True)
class Testbed:
    """product: one dense matrix product. experts: activation -> (time of all their products, products counted in n)."""

    name: str
    nodes: int
    gpus_per_node: int
    all_to_all: Linear
    gather: Linear
    scatter: Linear
    all_reduce: Linear
    product: Linear
    experts: Mapping[str, tuple[Linear, int]]


MS = 1e-3
A = Testbed(
    "A", 6, 8, Linear(0.28746 * MS, 2.3201e-6 * MS), Linear(0.33789 * MS, 2.3478e-7 * MS),
    Linear(0.39539 * MS, 2.2171e-7 * MS), Linear(0.51137 * MS, 4.9512e-6 * MS), Linear(0.353 * MS, 7.657e-11 * MS),
    {"simple": (Linear(0.706 * MS, 7.657e-11 * MS), 2),
     "swiglu": (Linear(0.957 * MS, 1.586e-10 * MS), 2)})   # 2, not 3: its rate includes the third product
# B's constants are per byte (derived: only so do they fit the paper's times), hence 4 per element.
B = Testbed(
    "B", 8, 4, Linear(0.175 * MS, 4 * 3.06e-7 * MS), Linear(0.032 * MS, 4 * 1.68e-7 * MS),
    Linear(0.0391 * MS, 4 * 1.67e-7 * MS), Linear(0.0837 * MS, 4 * 5.99e-7 * MS),
    Linear(0.0924 * MS, 4 * 4.42e-11 * MS),
    {"simple": (Linear(2 * 0.0924 * MS, 4 * 4.42e-11 * MS), 2),
     "swiglu": (Linear(3 * 0.0924 * MS, 4 * 4.42e-11 * MS), 3)})
TESTBEDS = (A, B)
