"""Published closed forms of a layer's time, for schedules to choose degrees by and for tests of the simulator.

Seconds of one chunk: a All-to-All (dispatch or combine), g gather and s scatter inside a node, e experts; r chunks.
G: gradient all-reduce given to the layer. A chunk's time is α + β n / r. Sources: "read" in the paper or its code,
"derived" here, "ours". FSMoE's forms describe the issue order: dispatch and gather of all chunks, G, experts and
scatter of all, combines of all, each collective on its own link's stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def pipemoe_seconds(a: float, e: float, r: int) -> float:
    """PipeMoE's two cases (read): communication-bound 2 r a for e <= a, compute-bound 2 a + r e.

    Its compute-bound case holds where r e >= 2 (r - 1) a only: before, the link that both All-to-Alls share is busier
    than compute (derived; `link_and_compute_seconds` covers all).
    """
    if r == 1:
        return 2 * a + e
    return 2 * r * a if e <= a else 2 * a + r * e


def link_and_compute_seconds(a: float, e: float, r: int) -> float:
    """One link, one compute stream, all dispatches before all combines (derived): the longer of PipeMoE's two cases."""
    return max(2 * r * a, 2 * a + r * e)


def pipemoe_degree(alpha_a: float, beta_n_a: float, alpha_e: float, beta_n_e: float) -> int:
    """PipeMoE's number of chunks (read) for a = alpha_a + beta_n_a / r and e = alpha_e + beta_n_e / r.

    The smallest r >= 2 that makes the layer communication-bound, or the one that balances compute's launches against
    the exposed first and last All-to-All, or (derived) the one where both bounds meet; whichever is faster.
    """
    found = [1.0, 2.0]
    if alpha_a > alpha_e:
        found.append((beta_n_e - beta_n_a) / (alpha_a - alpha_e))
    if alpha_e > 0:
        found.append(math.sqrt(2 * beta_n_a / alpha_e))
    found += _roots(2 * alpha_a - alpha_e, 2 * beta_n_a - 2 * alpha_a - beta_n_e, -2 * beta_n_a)
    degrees = {max(1, whole(r)) for r in found for whole in (math.floor, math.ceil)}
    return min(sorted(degrees),
               key=lambda r: link_and_compute_seconds(alpha_a + beta_n_a / r, alpha_e + beta_n_e / r, r))


def _roots(a: float, b: float, c: float) -> list[float]:
    """Real x with a x^2 + b x + c = 0."""
    if a == 0:
        return [-c / b] if b else []
    square = b * b - 4 * a * c
    return [(-b + sign * math.sqrt(square)) / (2 * a) for sign in (1, -1)] if square >= 0 else []


def fsmoe_case(a: float, g: float, s: float, e: float, r: int, G: float = 0.0) -> int:
    """FSMoE's case of a layer (read): 1 inter-node links never idle, 2 nor experts; 3 and 4 an intra-node one ends."""
    q1, q2, q3 = a > g, r * e > 2 * (r - 1) * a, r * e > (r - 1) * (g + s)
    slack = {2: r * e - 2 * (r - 1) * a + g + s, 3: g + s, 4: r * (g + s) - 2 * (r - 1) * a}
    if q1:
        case = 2 if q2 else 3
    else:
        case = 2 if q3 else 4
    return 1 if G > slack[case] else case


def fsmoe_seconds(a: float, g: float, s: float, e: float, r: int, G: float = 0.0) -> float:
    """FSMoE's four closed forms (read). Exact for g close to s; for others up to several times off (see tests)."""
    return {
        1: 2 * r * a + G,
        2: 2 * a + g + s + r * e,
        3: 2 * r * a + g + s,
        4: 2 * a + r * (g + s),
    }[fsmoe_case(a, g, s, e, r, G)]


def fsmoe_slack_seconds(a: float, g: float, s: float, e: float, r: int) -> float:
    """Gradient all-reduce that a layer hides at no cost (read): time of the inter-node link left free, G = 0."""
    return max(0.0, fsmoe_seconds(a, g, s, e, r) - 2 * r * a)


def partition_gradients(pending: Sequence[float], slack_seconds: Sequence[float], alpha_seconds: float,
                        seconds_per_byte: float) -> tuple[list[float], float]:
    """FSMoE's greedy step (read): bytes of dense gradients to reduce in each layer's slack, and the bytes left over.

    Layers in backward order; pending: bytes that become ready before each. A layer takes what fits its slack of what is
    there, nothing if its slack is not longer than α.
    """
    waiting, taken = 0.0, []
    for ready, slack in zip(pending, slack_seconds, strict=True):
        waiting += ready
        fits = max(0.0, slack - alpha_seconds) / seconds_per_byte
        taken.append(min(waiting, fits))
        waiting -= taken[-1]
    return taken, waiting


def place_rest(taken: Sequence[float], pending: Sequence[float], left: float, alpha_seconds: float) -> list[float]:
    """`taken` with the bytes that no slack holds, all in a layer that already reduces, or in the last of all (ours).

    Every byte past the slack costs β wherever it goes, so only the number of all-reduces matters: a layer that already
    has one costs no further α. The last one may hold every gradient.
    """
    if not left:
        return list(taken)
    last = len(taken) - 1
    chosen = [i for i, t in enumerate(taken) if t > 0 and sum(pending[i + 1:]) == 0] if alpha_seconds else []
    at = chosen[-1] if chosen else last
    return [t + left * (i == at) for i, t in enumerate(taken)]


def saa_seconds(a: float, g: float, n: int) -> float:
    """Parm's SAA (derived): n steps of an All-to-All of a each, and g to gather each one's result behind it."""
    return a + (n - 1) * max(a, g) + g


def parm_prefers_s1(gather, saa, all_to_all):
    """Parm's choice (derived): S1 gathers the layer's tokens, S2 the slots that came back, behind the All-to-All."""
    return gather < saa - all_to_all
