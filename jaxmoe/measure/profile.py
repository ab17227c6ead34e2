"""Measure collectives, matrix products and memory on the present devices, and fit a cluster file to them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from .. import collectives
from ..compat import vary_like
from ..plan.cluster import AlphaBeta, Cluster, Contention, Device, Link, LinkName, Matmul, Memory
from ..plan.cost import COLLECTIVES, bytes_sent
from .timing import in_a_row, seconds_of

SIZES = tuple(2**i for i in range(14, 24, 2))
PIECES = 4
LEAST = 16   # products beside an exchange: XLA:CPU runs the operations of short programs one after the other


@dataclass(frozen=True)
class Fit:
    """seconds = alpha_seconds + seconds_per_unit * amount, least squares of relative errors; r2 of the same.

    what: "inter.all_to_all" and the like (amounts are bytes that one device sends), "matmul" (flops), "memory" (bytes).
    """

    what: str
    alpha_seconds: float
    seconds_per_unit: float
    r2: float
    amounts: tuple[float, ...]
    seconds: tuple[float, ...]


def profile(mesh: Mesh, links: Mapping[str, LinkName], name: str, sizes: Sequence[int] = SIZES,
            widths: Sequence[int] = (128, 256, 512, 1024), repeats: int = 7,
            dtype: Any = jnp.float32) -> tuple[Cluster, list[Fit]]:
    """A cluster with origin "measured", and the fits that it holds; contention is that of the link between nodes, or of
    the only link.

    links: mesh axis -> link; collectives run over all axes of a link at once. sizes: bytes of a device's operand.
    widths: of square matrix products on every device at once. In a run of several processes all call this, and get what
    the first one measured.
    """
    used: dict[str, LinkName] = {axis: link for axis, link in links.items() if mesh.shape[axis] > 1}
    fits = []
    for link in dict.fromkeys(used.values()):
        axes = tuple(a for a in mesh.axis_names if used.get(a) == link)
        for kind in COLLECTIVES:
            fits.append(_measure(f"{link}.{kind}", partial(_collective, mesh, axes, kind, dtype), sizes, repeats))
    fits.append(_measure("matmul", partial(_matmul, mesh, dtype), widths, repeats))
    fits.append(_measure("memory", partial(_copy, mesh, dtype), sizes, repeats))
    by_name = {f.what: f for f in fits}
    cluster = _cluster(mesh, links, name, by_name)
    if used:
        both = _contention(mesh, used, by_name, sizes[-1], widths, repeats, dtype)
        cluster = cluster.model_copy(update={"contention": both})
    return cluster, fits


def axes_of(text: str) -> tuple[Mesh, dict[str, LinkName]]:
    """A mesh of the present devices, and its links, from "node=2:inter,gpu=4:intra".

    "" is what there is: processes as `node`, joined by "inter", their devices as `gpu`, joined by "intra".
    """
    if not text:
        node, gpu = jax.process_count(), jax.local_device_count()
        text = ",".join(part for part, n in ((f"node={node}:inter", node), (f"gpu={gpu}:intra", gpu)) if n > 1)
        text = text or "gpu=1:intra"
    sizes: dict[str, int] = {}
    links: dict[str, LinkName] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)=(\d+):(intra|inter)", part.strip())
        if found is None:
            raise ValueError(f"--axes must be like node=2:inter,gpu=4:intra, got {part!r}")
        sizes[found[1]] = int(found[2])
        links[found[1]] = "intra" if found[3] == "intra" else "inter"
    if math.prod(sizes.values()) != jax.device_count():
        raise ValueError(f"--axes must have a product of the {jax.device_count()} devices, got {sizes}")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)), links


def as_text(fits: Sequence[Fit]) -> str:
    """The fits as a table."""
    lines = [f"{'what':24s}{'alpha':>12s}{'per unit':>13s}{'r2':>8s}{'largest':>14s}"]
    lines += [f"{f.what:24s}{f.alpha_seconds:10.3g} s{f.seconds_per_unit:11.3g} s{f.r2:8.3f}{f.amounts[-1]:10.3g} in "
              f"{f.seconds[-1]:.3g} s" for f in fits]
    return "\n".join(lines)


def fit(what: str, amounts: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Line through measured times, weighted so that small and large amounts count alike; neither part below 0."""
    n, t = np.asarray(amounts, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(n), n], 1) / t[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(columns / columns.max(0), np.ones_like(t), rcond=None)
    alpha, beta = alpha / columns[:, 0].max(), beta / columns[:, 1].max()
    if alpha < 0:
        alpha, beta = 0.0, float(np.sum(columns[:, 1]) / np.sum(columns[:, 1] ** 2))
    if beta <= 0:
        raise ValueError(f"{what} must take longer for larger amounts to be fitted, got {t.tolist()} s for "
                         f"{n.tolist()}; measure larger sizes or more repeats")
    error, spread = np.sum((alpha + beta * n - t) ** 2), np.sum((t - t.mean()) ** 2)
    r2 = 1 - float(error / spread) if spread else 1.0
    return Fit(what, float(alpha), float(beta), r2, tuple(n.tolist()), tuple(t.tolist()))


def _measure(what: str, make: Callable[[int], tuple[Callable[[], Any], float, int]], sizes: Sequence[int],
             repeats: int) -> Fit:
    """Fit over sizes, measured in turns so that noise meets all alike. make: size -> (what to call, amount, how often
    that does it)."""
    made = {str(size): make(size) for size in sizes}
    seconds, _ = seconds_of({size: call for size, (call, *_) in made.items()}, repeats)
    return fit(what, [amount for _, amount, _ in made.values()],
               [seconds[size] / count for size, (*_, count) in made.items()])


def _on_every_device(mesh: Mesh, body: Callable, *shapes: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
    """Compiled call of body on zeros of these shapes, one of each a device; whole results, or XLA computes less."""
    spec = P(mesh.axis_names)

    def call(*blocks):
        return jax.tree.map(lambda y: vary_like(y, blocks[0])[None], body(*(b[0] for b in blocks)))

    mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * len(shapes), out_specs=spec))
    sharding = jax.sharding.NamedSharding(mesh, spec)
    zeros = [jax.jit(partial(jnp.zeros, (mesh.size, *s), dtype), out_shardings=sharding)() for s in shapes]
    return lambda: mapped(*zeros)


def _collective(mesh: Mesh, axes: tuple[str, ...], kind: str, dtype: Any, size: int):
    """A collective on an operand of about `size` bytes: rows that the group divides."""
    group = prod(mesh.shape[a] for a in axes)
    itemsize = jnp.dtype(dtype).itemsize
    shape = (group, max(1, size // itemsize // group))
    verb = collectives.psum if kind == "all_reduce" else getattr(collectives, kind)
    call = _on_every_device(mesh, lambda x: verb(x, axes), shape, dtype=dtype)
    sent = bytes_sent(kind, prod(shape) * itemsize, group)
    calls, count = in_a_row(call, sent)
    return calls, sent, count


def _matmul(mesh: Mesh, dtype: Any, width: int):
    return _on_every_device(mesh, jnp.matmul, (width, width), (width, width), dtype=dtype), 2.0 * width**3, 1


def _contention(mesh: Mesh, links: Mapping[str, LinkName], fits: Mapping[str, Fit], size: int, widths: Sequence[int],
                repeats: int, dtype: Any) -> Contention:
    """Factor by which an All-to-All and matrix products slow each other down, taken to be the same for both: 1 = not at
    all, 2 = they might as well take turns.

    Of All-to-Alls of the largest `size` together, and of as many products of one width as take about as long, both in
    `PIECES`, as chunks are: the start of a transfer is disturbed more than the rest.
    """
    which = "inter" if "inter" in links.values() else "intra"
    axes = tuple(a for a in mesh.axis_names if links.get(a) == which)
    link, matmul = fits[f"{which}.all_to_all"], fits["matmul"]
    group = prod(mesh.shape[a] for a in axes)
    rows = (PIECES, group, max(1, size // jnp.dtype(dtype).itemsize // group // PIECES))
    alone = dict(zip(widths, matmul.seconds, strict=True))
    width = max([w for w in widths if LEAST * alone[w] <= link.seconds[-1]], default=min(widths))
    count = max(LEAST, round(link.seconds[-1] / alone[width])) // PIECES

    def sent(x):
        return [collectives.all_to_all(piece, axes) for piece in x]

    def products(a, b):
        found = [a + i for i in range(PIECES)]
        for _ in range(count):
            found = [each @ b for each in found]
        return found

    square = (width, width)
    calls = {"link": _on_every_device(mesh, sent, rows, dtype=dtype),
             "compute": _on_every_device(mesh, products, square, square, dtype=dtype),
             "both": _on_every_device(mesh, lambda x, a, b: (sent(x), products(a, b)), rows, square, square,
                                      dtype=dtype)}
    seconds, _ = seconds_of(calls, repeats)
    shorter, longer = sorted((seconds["link"], seconds["compute"]))
    slower = min(2.0, max(1.0, 1 + (seconds["both"] - longer) / shorter))
    return Contention(origin="measured", sms_for_links={}, link_slowdown=slower, compute_slowdown=slower)


def _copy(mesh: Mesh, dtype: Any, size: int):
    """An element-wise pass: reads and writes `size` bytes each."""
    itemsize = jnp.dtype(dtype).itemsize
    count = max(1, size // itemsize)
    call = _on_every_device(mesh, lambda x: x + 1, (count,), dtype=dtype)
    moved = 2.0 * count * itemsize
    calls, times = in_a_row(call, moved)
    return calls, moved, times


def _cluster(mesh: Mesh, links: Mapping[str, LinkName], name: str, fits: Mapping[str, Fit]) -> Cluster:
    def link(which: str) -> Link:
        found = {kind: fits[f"{which}.{kind}"] for kind in COLLECTIVES if f"{which}.{kind}" in fits}
        return Link(**{kind: AlphaBeta(origin="measured", alpha_seconds=f.alpha_seconds,
                                       seconds_per_byte=f.seconds_per_unit) for kind, f in found.items()})

    nodes = prod(size for axis, size in mesh.shape.items() if links.get(axis) == "inter")
    device = mesh.local_devices[0]
    matmul, memory = fits["matmul"], fits["memory"]
    return Cluster(
        name=name, nodes=nodes, gpus_per_node=mesh.size // nodes, gpu=device.device_kind.lower().replace(" ", "-"),
        links=dict(links), device=Device(origin="measured", memory_bytes=_memory_bytes(device, mesh)),
        intra=link("intra"), inter=link("inter"),
        matmul=Matmul(origin="measured", alpha_seconds=matmul.alpha_seconds, seconds_per_flop=matmul.seconds_per_unit),
        memory=Memory(origin="measured", alpha_seconds=memory.alpha_seconds,
                      bytes_per_second=1 / memory.seconds_per_unit))


def _memory_bytes(device: Any, mesh: Mesh) -> int:
    """What the device reports; simulated devices share the machine's memory."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.size
