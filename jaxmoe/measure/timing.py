"""Seconds of calls, side by side."""

import math
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SUSTAINED = 2**20
MOST = 16   # calls in a row


def times_of(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns, so that noise meets all alike; after one call each.

    In a run of several processes all make the same calls, begin each together, and get what the first one's clock
    said: a collective would otherwise count the wait for processes that are still at an earlier call.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("measure")
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    if jax.process_count() > 1:
        first = multihost_utils.broadcast_one_to_all(np.asarray(list(times.values())))
        times = {name: row.tolist() for name, row in zip(times, first, strict=True)}
    return times


def in_a_row(call: Callable[[], Any], sent_bytes: float) -> tuple[Callable[[], None], int]:
    """One call that calls a collective until a device has sent `SUSTAINED` bytes, `MOST` times at most, and how often.

    A single message after a pause fills buffers on the way, and seems faster than the link, which a step does not see.
    """
    count = min(MOST, math.ceil(SUSTAINED / max(sent_bytes, 1)))

    def calls() -> None:
        for _ in range(count):
            jax.block_until_ready(call())

    return calls, count


def seconds_of(calls: Mapping[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each of `times_of`, and (largest - smallest) / median."""
    times = times_of(calls, repeats)
    middle = {name: median(t) for name, t in times.items()}
    return middle, {name: (max(t) - min(t)) / middle[name] for name, t in times.items()}
