"""From a config and a cluster to a plan, and what a plan says about time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from .mesh import abstract_mesh
from .models.abstract import abstract_model, abstract_parameters, stored_size
from .models.decoder import spec_of
from .plan import codec_policy
from .plan.block import SAVED, Block
from .plan.cluster import Cluster, as_cluster
from .plan.memory import Memory
from .plan.passes import sm_aware
from .plan.plan import Plan
from .plan.search import PLANNERS, Found, fastest_way, plan_memory, search
from .plan.tasks import Degrees
from .planned.decoder import decoder_block, stack_parameters
from .types import PARAMETER_CLASSES, ROW_CLASSES, TENSOR_CLASSES

# Classes of tensors that the planner codes or leaves together.
TOGETHER = (ROW_CLASSES, PARAMETER_CLASSES)
# train.remat -> families of values that are kept for the backward pass.
KEPT = {
    "none": SAVED,
    "dots": tuple(f for f in SAVED if f not in ("o", "n")),
    "full": ("x",),
}


def plan(cfg: Any, cluster: Cluster | str | Path | None = None) -> Plan:
    """The plan that `[schedule]` asks for, for the model and batch of cfg.

    cluster: costs to plan with; None = `schedule.cluster`. Raises ValueError if the plan in `schedule.plan` was made
    for other shapes, if the schedule is "plain", or if the block cannot be cut so; "auto" also if no plan fits the
    device's memory.

    Example: ``made = jaxmoe.plan(jaxmoe.load_config("configs/mixtral-8x7b-8x8-h100.toml"), "8x8-h100")``
    """
    cluster = as_cluster(cfg.schedule.cluster if cluster is None else cluster)
    kind = cfg.schedule.kind
    if cfg.schedule.plan is not None:
        auto = {name for name, how in cfg.codec.asked.items() if how == "auto"}
        return _finished(_read(cfg.schedule.plan, coded(cfg, cluster), auto), cluster, cfg)
    if kind not in PLANNERS:
        raise ValueError(f"schedule.kind must be one of {', '.join(PLANNERS)} to make a plan, got {kind!r}")
    if kind == "auto":
        return _finished(_searched(cfg, cluster, _degrees(cfg)).plan, cluster, cfg)
    made = PLANNERS[kind](coded(cfg, cluster), cluster, _degrees(cfg), saved=KEPT[cfg.train.remat],
                          slices=cfg.schedule.slices)
    return _finished(made, cluster, cfg)


def compare(cfg: Any, cluster: Cluster) -> tuple[Plan, dict[str, float]]:
    """The plan that cfg asks for, and the modelled seconds of every schedule that can run it, at its best degrees."""
    if cfg.schedule.kind == "auto" and cfg.schedule.plan is None and cfg.schedule.degrees is None:
        found = _searched(cfg, cluster)
        return _finished(found.plan, cluster, cfg), found.seconds
    return plan(cfg, cluster), _searched(cfg, cluster, memory_bytes=math.inf).seconds


def candidates(cfg: Any, cluster: Cluster) -> list[Plan]:
    """`schedule.candidates` plans of "auto" to be measured, the one first that is expected to be the fastest."""
    found = _searched(cfg, cluster, _degrees(cfg)).unlike(cfg.schedule.candidates)
    return [_finished(made, cluster, cfg) for made in found]


def memory_of(cfg: Any, made: Plan) -> Memory:
    """What a plan of cfg takes on a device, what it stores outside of the stack included: an estimate."""
    return plan_memory(made, _outside(cfg))


def _searched(cfg: Any, cluster: Cluster, degrees: Degrees | None = None, memory_bytes: float | None = None) -> Found:
    """Under the device's memory; what `train.remat` keeps, or less where that does not fit."""
    outside, found, refused = _outside(cfg), [], None
    for block in ways_to_code(cfg, cluster):
        try:
            found.append(search(block, cluster, degrees, cfg.schedule.slices, KEPT[cfg.train.remat], outside,
                                memory_bytes))
        except ValueError as e:
            refused = refused or e
    if refused is not None and not found:
        raise refused
    return fastest_way(found)


def ways_to_code(cfg: Any, cluster: Cluster) -> list[Block]:
    """The block as `[codec]` asks for, and again without what "auto" codes of activations, of parameters or of both:
    sending may hide behind compute where coding, itself compute, cannot."""
    block, found = block_of(cfg, cluster), []
    for off in itertools.chain.from_iterable(itertools.combinations(TOGETHER, n) for n in range(len(TOGETHER) + 1)):
        names = set(itertools.chain(*off))
        asked = {name: "off" if how == "auto" and name in names else how for name, how in cfg.codec.asked.items()}
        found.append(_coded(block, cfg, cluster, asked))
    return list(dict.fromkeys(found))


def _outside(cfg: Any) -> float:
    """How many parameters one device stores outside of the stack."""
    mesh = abstract_mesh(cfg)
    return sum(stored_size(leaf, spec, mesh) for name, (leaf, spec) in abstract_parameters(cfg, mesh).items()
               if not name.startswith("blocks."))


def codec_choices(cfg: Any, cluster: Cluster) -> tuple[codec_policy.Choice, ...]:
    """How each class of tensors is coded, as `[codec]` asks for, and why."""
    return _choices(block_of(cfg, cluster), cfg, cluster, cfg.codec.asked)


def coded(cfg: Any, cluster: Cluster) -> Block:
    """The config's block, coded as `[codec]` asks for."""
    return _coded(block_of(cfg, cluster), cfg, cluster, cfg.codec.asked)


def _coded(block: Block, cfg: Any, cluster: Cluster, asked: Mapping[str, str]) -> Block:
    return replace(block, codec=codec_policy.codec_of(_choices(block, cfg, cluster, asked)))


def _choices(block: Block, cfg: Any, cluster: Cluster, asked: Mapping[str, str]) -> tuple[codec_policy.Choice, ...]:
    degrees = _degrees(cfg)
    if degrees is not None and block.chunk == "slots":   # schedules that cut otherwise say so themselves
        degrees = Degrees(degrees.moe_forward, degrees.moe_backward)
    return codec_policy.choose(block, cluster, asked, cfg.codec.min_bytes, degrees)


def _degrees(cfg: Any) -> Degrees | None:
    return None if cfg.schedule.degrees is None else Degrees(**cfg.schedule.degrees.model_dump())


def _finished(made: Plan, cluster: Cluster, cfg: Any) -> Plan:
    made = sm_aware(made, cluster) if cfg.schedule.sm_aware else made
    return made if cfg.schedule.barriers else replace(made, barriers=False)


def _read(path: str, block: Block, auto: set[str]) -> Plan:
    """auto: classes of tensors that may be coded otherwise than in the config's block."""
    try:
        found = Plan.from_json(Path(path).read_text())
    except OSError as e:
        raise ValueError(f"schedule.plan {path!r} cannot be read: {e.strerror}") from e
    free = ("links", "chunk", "segment", "fused", "split", "hierarchical", "codec")
    both = [(n, getattr(found.block, n), getattr(block, n)) for n in Block.__dataclass_fields__ if n not in free]
    formats = dict(found.block.codec), dict(block.codec)
    both += [(f"codec.{n}", *(f.get(n, "off") for f in formats)) for n in TENSOR_CLASSES if n not in auto]
    for name, there, here in both:
        if there != here:
            raise ValueError(f"schedule.plan {path!r} was made for {name} {there!r}, but this run has {here!r}; "
                             f"make it again with `jaxmoe plan CONFIG --out {path}`")
    return found


def block_of(cfg: Any, cluster: Cluster) -> Block:
    """The block of a config's model, from shapes alone."""
    mesh = abstract_mesh(cfg)
    shapes, specs = _layer_parameters(cfg, mesh)
    return decoder_block(cfg, spec_of(cfg, mesh), shapes, specs, cfg.train.batch // cfg.train.accumulate,
                         dict(cluster.links))


def _layer_parameters(cfg: Any, mesh: AbstractMesh) -> tuple[dict[str, tuple[int, ...]], dict[str, P]]:
    """Shapes and shardings of one layer of the scanned stack, by the names that plans use."""
    found = stack_parameters(abstract_model(cfg, mesh).blocks[0])
    shapes = {n: tuple(v.get_value().shape[1:]) for n, v in found.items()}
    return shapes, {n: P(*tuple(v.get_metadata("spec", P()))[1:]) for n, v in found.items()}
