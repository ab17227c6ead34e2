"""Seconds of a task on a cluster."""

from __future__ import annotations

import math

from .cluster import Cluster
from .tasks import Part, Pass, Task, codec_of

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def bytes_sent(kind: str, operand_bytes: float, group: int) -> float:
    """Bytes that one of `group` devices sends in a collective on an operand of this size on each."""
    factor = {"all_to_all": 1, "all_gather": group, "reduce_scatter": 1, "all_reduce": 2}[kind]
    return operand_bytes * factor * (group - 1) / group


def seconds(task: Task, cluster: Cluster) -> float:
    """Time of the task when nothing else runs.

    A matrix product takes the longer of its flops and its bytes through memory; "encode:FORMAT" and "decode:FORMAT"
    take raw bytes at the codec's rate; a collective over both links takes the slower one (ours); one of several parts
    their sum; one that codes by itself, its coding as well. Where the cluster has a module of the task's, that takes
    the place of all but launching.
    """
    launch = cluster.device.launch_seconds
    module = cluster.modules.get(module_of(task)) if is_module(task) else None
    if module is not None:
        return launch + module.alpha_seconds + module.seconds_per_unit * amount(task)
    if task.kind == "matmul":
        product, rate = cluster.matmul, cluster.memory.bytes_per_second
        return launch + product.alpha_seconds + max(task.flops * product.seconds_per_flop, task.bytes / rate)
    if task.kind == "memory":
        return launch + cluster.memory.alpha_seconds + task.bytes / cluster.memory.bytes_per_second
    verb, _, codec = task.kind.partition(":")
    if verb in COLLECTIVES:
        parts = task.parts or (Part(verb, task.streams, task.bytes, task.between),)
        return launch + math.fsum(_collective_seconds(p, task.name, cluster) for p in parts) + (
            coding_seconds(cluster, codec, task.encoded, task.decoded) if codec else 0.0)
    if verb not in ("encode", "decode"):
        kinds = ("matmul", "memory", *COLLECTIVES, "encode:FORMAT", "decode:FORMAT")
        raise ValueError(f"kind of task {task.name!r} must be one of {', '.join(kinds)}, got {task.kind!r}")
    sizes = (task.bytes, 0.0) if verb == "encode" else (0.0, task.bytes)
    return launch + coding_seconds(cluster, codec, *sizes)


def module_of(task: Task) -> str:
    """Key under which a task's measured cost is filed: "attend", "experts_up:dx", "encode_dispatch:x4s". A recomputed
    task has that of its forward task."""
    suffix = "" if task.direction == "recompute" else task.name.partition(":")[2]
    return ":".join(part for part in (task.verb, suffix, codec_of(task)) if part)


def is_module(task: Task) -> bool:
    """Whether its amount says what it takes: not so if it has parts, which may be of several kinds or links, nor if
    it has no amount, as a gather of parameters that are whole already: a real gather may have the same name."""
    return not task.parts and amount(task) > 0


def amount(task: Task) -> float:
    """What a module's time is counted in: flops of a matrix product, and else bytes."""
    return task.flops if task.kind == "matmul" else task.bytes


def durations(pass_: Pass, cluster: Cluster) -> dict[str, float]:
    """Task name -> seconds."""
    return {t.name: seconds(t, cluster) for t in pass_.tasks}


def _collective_seconds(part: Part, task: str, cluster: Cluster) -> float:
    """Over both links: their bytes fly at once, after the larger α."""
    costs = {s: cluster.collective(s, part.kind) for s in part.streams if s != "compute"}
    if not costs:
        raise ValueError(f"task {task!r} of kind {part.kind!r} must occupy intra or inter, got {part.streams}")
    alpha = max(c.alpha_seconds for c in costs.values())
    shares = {"inter": part.between, "intra": 1 - part.between} if len(costs) > 1 else dict.fromkeys(costs, 1.0)
    return alpha + max(c.seconds_per_byte * part.bytes * shares[s] for s, c in costs.items())


def coding_seconds(cluster: Cluster, codec: str, encoded: float, decoded: float) -> float:
    """Seconds to encode and to decode so many uncoded bytes; "raw" only moves them, once read and once written."""
    name = codec.partition(":")[0]
    if name == "raw":
        rates = (cluster.memory.bytes_per_second / 2,) * 2
    elif name in cluster.codecs:
        rates = cluster.codecs[name].encode_bytes_per_second, cluster.codecs[name].decode_bytes_per_second
    else:
        raise ValueError(f"cluster {cluster.name!r} must have codecs.{name}, which the plan needs; "
                         f"got {', '.join(cluster.codecs) or 'none'}")
    return sum(cluster.memory.alpha_seconds + n / rate for n, rate in zip((encoded, decoded), rates, strict=True) if n)
