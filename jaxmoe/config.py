"""The config: TOML plus dotted overrides, frozen and validated. An error is one line that names the key to change."""

from __future__ import annotations

import difflib
import math
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from .types import TENSOR_CLASSES

ROLES = ("data", "expert", "expert_shard", "model", "fsdp")
EXCLUSIVE = (("data", "model"), ("expert", "expert_shard"), ("fsdp", "model"))
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """Bad config; the message is one line. A `ValueError`, so that `except ValueError` catches it.

    Example: ``assert issubclass(ConfigError, ValueError)``
    """


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MeshConfig(Section):
    axes: dict[str, int] = {"device": -1}


class ParallelConfig(Section):
    """Mesh axes of each role; a role left out is off.

    kind: "auto" lets the planner choose the roles that are left out (see `jaxmoe.roles`). sizes: role -> devices of its
    groups, of those; others may have any size.
    """

    kind: Literal["given", "auto"] = "given"
    sizes: dict[Literal["data", "expert", "expert_shard", "model", "fsdp"], PositiveInt] = {}
    data: tuple[str, ...] = ()
    expert: tuple[str, ...] = ()
    expert_shard: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()


class ModelConfig(Section):
    layers: PositiveInt = 4
    d_model: PositiveInt = 128
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    d_ff: PositiveInt = 512
    vocab: PositiveInt = 256
    seq: PositiveInt = 128
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    qk_norm: bool = True
    tied: bool = True
    moe_every: PositiveInt = 1
    scan: bool = False
    attention: Literal["auto", "plain", "cudnn"] = "auto"


class TopKConfig(Section):
    """Each token takes its k best experts; with `groups`, out of the best `groups_kept` groups of experts only."""

    kind: Literal["topk"] = "topk"
    k: PositiveInt = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool | None = None
    scale: PositiveFloat = 1.0
    groups: PositiveInt = 1
    groups_kept: PositiveInt = 1
    bias_update_rate: NonNegative = 0.0


class NoisyTopKConfig(Section):
    kind: Literal["noisy_topk"] = "noisy_topk"
    k: PositiveInt = 2


class CosineConfig(Section):
    kind: Literal["cosine"] = "cosine"
    k: PositiveInt = 1
    projection_rank: PositiveInt | None = None
    normalize: bool = False


class ExpertChoiceConfig(Section):
    """Each expert takes its best tokens. Leaks later tokens in a causal model."""

    kind: Literal["expert_choice"] = "expert_choice"
    capacity_factor: PositiveFloat = 2.0


class SoftConfig(Section):
    """Slots are weighted means of tokens. Leaks later tokens in a causal model."""

    kind: Literal["soft"] = "soft"
    slots_per_expert: PositiveInt = 1


class SlotsConfig(Section):
    kind: Literal["slots"] = "slots"
    capacity_factor: PositiveFloat = 1.25


class RaggedConfig(Section):
    kind: Literal["ragged"] = "ragged"
    buffer_factor: PositiveFloat = 1.5


def _with_kind(kind: str) -> BeforeValidator:
    """A table without `kind` is of this one."""
    return BeforeValidator(lambda value: {"kind": kind} | value if isinstance(value, dict) else value)


RouterConfig = TopKConfig | NoisyTopKConfig | CosineConfig | ExpertChoiceConfig | SoftConfig
DispatchConfig = SlotsConfig | RaggedConfig
TAGS = ("topk", "noisy_topk", "cosine", "expert_choice", "soft", "slots", "ragged")


class MoEConfig(Section):
    num_experts: PositiveInt = 8
    d_ff: PositiveInt = 256
    activation: Literal["swiglu", "gelu", "relu"] = "swiglu"
    router: Annotated[RouterConfig, Field(discriminator="kind"), _with_kind("topk")] = TopKConfig()
    dispatch: Annotated[DispatchConfig, Field(discriminator="kind"), _with_kind("slots")] = SlotsConfig()
    shared_experts: Annotated[int, Field(ge=0)] = 0
    group: Literal["sequence"] | PositiveInt = "sequence"
    load_balance: Literal["switch", "hf", "megatron", "deepseek_seq"] = "switch"
    load_balance_coef: NonNegative = 0.01
    router_z_coef: NonNegative = 1e-3
    importance_coef: NonNegative = 0.0


CodecName = Literal["off", "auto", "raw", "x4s", "x3p", "x3", "x4s:as-bf16", "x3p:as-bf16", "x3:as-bf16"]


class DegreesConfig(Section):
    """Number of chunks of MoE and of other tasks."""

    moe_forward: PositiveInt = 1
    moe_backward: PositiveInt = 1
    dense_forward: PositiveInt = 1
    dense_backward: PositiveInt = 1


class ScheduleConfig(Section):
    """kind: "plain" runs without a plan, in whatever order XLA finds; "auto" is the fastest that the schedules can be
    combined to, of any chunk and segment.

    cluster: file or shipped name of the cluster whose costs a plan is made with. degrees: None = the fastest in
    simulation. plan: a file to take the plan from instead. chunk: what chunks are cut along. segment: layers planned
    together; "auto" tries 1 and 2 where it is 1. hierarchical: All-to-Alls over both links come in two, within nodes
    and between them. "auto" chooses chunk and hierarchical itself, whatever is given. slices: pieces of the dense
    gradient's reduction; None = the schedule's choice. barriers: False leaves the order of tasks to XLA. sm_aware: ties
    tasks so that links get their multiprocessors first (see `jaxmoe.plan.passes.sm`). profile: before a run's first
    step, measure what the model's tasks take on the present devices (`jaxmoe.measure.modules`), and plan with that
    instead of the cluster's costs. candidates: for "auto", how many of the planner's best plans are timed as whole
    steps before a run's first step; the fastest is run. Those with other chunks than the best come first. The choice is
    kept in `train.run_dir` as plan.json, the costs as cluster.toml.
    """

    kind: Literal["plain", "sequential", "pipemoe", "parm-s1", "parm-s2", "fsmoe", "mast", "sp-moe", "auto"] = "plain"
    cluster: str = "8x8-h100"
    degrees: DegreesConfig | None = None
    plan: str | None = None
    chunk: Literal["slots", "batch", "sequence"] = "slots"
    segment: PositiveInt = 1
    hierarchical: bool = False
    slices: PositiveInt | None = None
    barriers: bool = True
    sm_aware: bool = False
    profile: bool = False
    candidates: PositiveInt = 1

    @property
    def is_planned(self) -> bool:
        """Whether stacks run as a plan says, one that is made or one that is read."""
        return self.kind != "plain" or self.plan is not None


class CodecConfig(Section):
    """How collectives of a planned schedule are coded, without loss.

    kind: "auto" decides by the costs of `schedule.cluster`; a format codes everything. dispatch, combine, parameters,
    gradients: the same words for one class of tensors; None = kind. min_bytes: a class whose largest collective sends
    less on a device stays as it is.
    """

    kind: CodecName = "off"
    dispatch: CodecName | None = None
    combine: CodecName | None = None
    parameters: CodecName | None = None
    gradients: CodecName | None = None
    min_bytes: Annotated[int, Field(ge=0)] = 0

    @property
    def asked(self) -> dict[str, str]:
        """Tensor class -> what is asked for it."""
        return {name: getattr(self, name) or self.kind for name in TENSOR_CLASSES}


class DataConfig(Section):
    kind: Literal["stdlib", "text"] = "stdlib"
    files: str | None = None
    tokenizer: str | None = None


class TrainConfig(Section):
    """batch: sequences of one optimizer step over all devices, computed in `accumulate` equal microbatches."""

    steps: PositiveInt = 400
    batch: PositiveInt = 32
    learning_rate: PositiveFloat = 3e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    min_learning_rate: NonNegative = 3e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 30
    b1: Rate = 0.9
    b2: Rate = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.1
    clip_norm: PositiveFloat = 1.0
    accumulate: PositiveInt = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "full", "dots"] = "none"
    seed: int = 0
    eval_every: Annotated[int, Field(ge=0)] = 100
    eval_batches: Annotated[int, Field(ge=0)] = 8
    checkpoint_every: Annotated[int, Field(ge=0)] = 200
    log_every: PositiveInt = 20
    run_dir: str = "runs/default"
    data: DataConfig = DataConfig()
    sample_prompt: str = "def "
    sample_tokens: Annotated[int, Field(ge=0)] = 200


class Config(Section):
    mesh: MeshConfig = MeshConfig()
    parallel: ParallelConfig = ParallelConfig()
    model: ModelConfig = ModelConfig()
    moe: MoEConfig = MoEConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    codec: CodecConfig = CodecConfig()
    train: TrainConfig = TrainConfig()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply overrides, validate. Raises ConfigError.

    Example: ``cfg = load_config("configs/quickstart.toml", ["moe.router.k=4", "train.run_dir=runs/k4"])``
    """
    try:
        tree = tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"config file {str(path)!r} must be TOML: {e}") from e
    for override in overrides:
        _apply(tree, override)
    return from_dict(tree)


def from_dict(tree: dict[str, Any]) -> Config:
    """Validate a config given as nested dicts."""
    try:
        cfg = Config.model_validate(_tuples(tree))
    except ValidationError as e:
        raise ConfigError(_message(e)) from None
    _check_mesh(cfg)
    _check_parallel(cfg)
    _check_sizes(cfg)
    _check_router(cfg)
    _check_train(cfg)
    _check_schedule(cfg)
    _check_codec(cfg)
    return cfg


def _tuples(value: Any) -> Any:
    """TOML has lists only; the frozen config holds tuples."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} must have the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for i, part in enumerate(parts[:-1]):
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parts[: i + 1])} is a value, not a table")
    tree[parts[-1]] = value


def _message(error: ValidationError) -> str:
    """The first fault as one line: key, what must hold, what was given; the nearest name for an unknown key."""
    fault = error.errors()[0]
    loc = [str(p) for p in fault["loc"] if p not in ("literal['sequence']", "constrained-int")]
    key = ".".join(p for p in loc if p not in TAGS)
    if fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        tag, tags = context["tag"], context["expected_tags"].replace("'", "")
        return f"{key}.kind must be one of {tags}, got {tag!r}{_nearest(tag, tags.split(', '), '')}"
    if fault["type"] == "extra_forbidden":
        names = _names(loc[:-1])
        return f"unknown key {key}{_nearest(loc[-1], names, '; known: ' + ', '.join(names))}"
    return f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {fault['input']!r}"


def _nearest(name: str, names: list[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, names, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else otherwise


def _names(path: list[str]) -> list[str]:
    """Keys of the table at path, in which the kind of a table follows its name."""
    models = [Config]
    for part in path:
        if part in TAGS:
            models = [m for m in models if m.model_fields["kind"].default == part]
            continue
        fields = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        models = [a for f in fields for a in getattr(f, "__args__", (f,)) if isinstance(a, type)]
    return sorted({name for m in models if issubclass(m, BaseModel) for name in m.model_fields})


def _check_mesh(cfg: Config) -> None:
    axes = cfg.mesh.axes
    if not axes:
        raise ConfigError("mesh.axes must name at least one axis, got none")
    for name, size in axes.items():
        if size < 1 and size != -1:
            raise ConfigError(f"mesh.axes.{name} must be positive, or -1 once for what is left, got {size}")
    if list(axes.values()).count(-1) > 1:
        raise ConfigError(f"mesh.axes may hold -1 once, got {axes}")
    for role in ROLES:
        used = getattr(cfg.parallel, role)
        for axis in used:
            if axis not in axes:
                raise ConfigError(f"parallel.{role} must use axes of mesh.axes ({', '.join(axes)}), got {axis!r}")
        if len(set(used)) < len(used):
            raise ConfigError(f"parallel.{role} must use an axis once, got {list(used)}")
    for one, other in EXCLUSIVE:
        both = set(getattr(cfg.parallel, one)) & set(getattr(cfg.parallel, other))
        if both:
            raise ConfigError(f"parallel.{one} and parallel.{other} exclude each other on an axis, "
                              f"got {sorted(both)[0]!r} in both")


def _check_parallel(cfg: Config) -> None:
    p = cfg.parallel
    if p.sizes and p.kind != "auto":
        raise ConfigError(f'parallel.sizes needs parallel.kind="auto", got {p.sizes} with "{p.kind}"')
    if p.kind == "auto" and (cfg.schedule.kind == "plain" or cfg.schedule.plan is not None):
        got = f'"{cfg.schedule.kind}"' if cfg.schedule.plan is None else f"schedule.plan={cfg.schedule.plan!r}"
        raise ConfigError(f'parallel.kind="auto" needs a schedule.kind that is planned, such as "auto", got {got}')
    for role in p.sizes:
        if getattr(p, role):
            raise ConfigError(f"parallel.sizes.{role} must be left out where parallel.{role} is given, got both")


def _check_sizes(cfg: Config) -> None:
    m, e = cfg.model, cfg.moe
    if m.d_model % m.heads or m.d_model // m.heads % 2:
        raise ConfigError(f"model.d_model must be an even multiple of model.heads={m.heads}, got {m.d_model}")
    if m.heads % m.kv_heads:
        raise ConfigError(f"model.heads must be a multiple of model.kv_heads={m.kv_heads}, got {m.heads}")
    if m.layers < m.moe_every:
        raise ConfigError(f"model.moe_every must be at most model.layers={m.layers}, got {m.moe_every}")
    split = (
        ("moe.num_experts", e.num_experts, "expert"), ("moe.d_ff", e.d_ff, "expert_shard"),
        ("model.heads", m.heads, "model"), ("model.kv_heads", m.kv_heads, "model"), ("model.d_ff", m.d_ff, "model"),
        ("model.d_model", m.d_model, "fsdp"), ("model.d_ff", m.d_ff, "fsdp"), ("model.vocab", m.vocab, "fsdp"),
    )
    for key, size, role in split:
        sizes = [cfg.mesh.axes[a] for a in getattr(cfg.parallel, role)]
        if -1 not in sizes and size % math.prod(sizes):
            count = math.prod(sizes)
            raise ConfigError(f"{key} must be divisible by {count}, the devices of parallel.{role}, got {size}")


def _check_router(cfg: Config) -> None:
    e, router = cfg.moe, cfg.moe.router
    if isinstance(router, (SoftConfig, ExpertChoiceConfig)):
        if isinstance(router, SoftConfig) and e.dispatch.kind == "ragged":
            raise ConfigError('moe.dispatch.kind must be "slots" for moe.router.kind="soft", got "ragged"')
        warnings.warn(f"moe.router.kind={router.kind!r} leaks later tokens to earlier ones in a causal language model: "
                      "its loss is too low and cannot be reached when generating", UserWarning, stacklevel=3)
        return
    experts, of = e.num_experts, "moe.num_experts"
    if isinstance(router, TopKConfig):
        if e.num_experts % router.groups:
            raise ConfigError(f"moe.router.groups must divide moe.num_experts={e.num_experts}, got {router.groups}")
        if router.groups_kept > router.groups:
            raise ConfigError(f"moe.router.groups_kept must be at most moe.router.groups={router.groups}, "
                              f"got {router.groups_kept}")
        if router.groups_kept < router.groups:
            experts = e.num_experts // router.groups * router.groups_kept
            of = "the experts of moe.router.groups_kept groups"
    if router.k > experts:
        raise ConfigError(f"moe.router.k must be at most {of}={experts}, got {router.k}")
    if router.k == 1 and getattr(router, "normalize", None):
        warnings.warn("moe.router.normalize=true with moe.router.k=1 makes every weight 1: the router gets no gradient "
                      "from the cross-entropy", UserWarning, stacklevel=3)


def _check_train(cfg: Config) -> None:
    t = cfg.train
    given = {axis for role in ROLES for axis in getattr(cfg.parallel, role)}
    for axis, size in cfg.mesh.axes.items():
        if size > 1 and axis not in given and cfg.parallel.kind == "given":
            warnings.warn(f"mesh axis {axis!r} has no role in parallel: its {size} devices all do the same work",
                          UserWarning, stacklevel=3)
    if t.batch % t.accumulate:
        raise ConfigError(f"train.batch must be a multiple of train.accumulate={t.accumulate}, got {t.batch}")
    if t.data.kind == "text" and not t.data.files:
        raise ConfigError('train.data.files must be a glob pattern for train.data.kind="text", got none')


def _check_schedule(cfg: Config) -> None:
    if cfg.schedule.profile and (cfg.schedule.kind == "plain" or cfg.schedule.plan is not None):
        given = f'schedule.kind="{cfg.schedule.kind}"' if cfg.schedule.plan is None else "schedule.plan"
        raise ConfigError(f"schedule.profile must be false where no plan is made from costs, got true with {given}")
    if cfg.schedule.candidates > 1 and (cfg.schedule.kind != "auto" or cfg.schedule.plan is not None):
        given = f'schedule.kind="{cfg.schedule.kind}"' if cfg.schedule.plan is None else "schedule.plan"
        raise ConfigError(f'schedule.candidates must be 1 but for schedule.kind="auto" without schedule.plan, got '
                          f"{cfg.schedule.candidates} with {given}")
    if not cfg.schedule.is_planned:
        return
    for key, value, want in (("model.scan", cfg.model.scan, True), ("model.moe_every", cfg.model.moe_every, 1)):
        if value != want:
            raise ConfigError(f"{key} must be {str(want).lower()} for a planned schedule (schedule.kind), "
                              f"got {str(value).lower()}")
    if cfg.model.layers % cfg.schedule.segment:
        raise ConfigError(f"schedule.segment must divide model.layers={cfg.model.layers}, got {cfg.schedule.segment}")
    if isinstance(cfg.moe.router, SoftConfig):
        raise ConfigError('schedule.kind must be "plain" for moe.router.kind="soft", got ' f'"{cfg.schedule.kind}"')


def _check_codec(cfg: Config) -> None:
    asked = {key: value for key in ("kind", *TENSOR_CLASSES) if (value := getattr(cfg.codec, key)) not in (None, "off")}
    if not asked:
        return
    key, value = next(iter(asked.items()))
    if not cfg.schedule.is_planned:
        raise ConfigError(f'codec.{key}="{value}" needs a planned schedule: schedule.kind must not be "plain"')
    for key, value in asked.items():
        if value.endswith(":as-bf16") and key != "gradients":
            raise ConfigError(f'codec.{key} must be without ":as-bf16", which is for codec.gradients, got "{value}"')
        if value != "auto" and key != "gradients" and cfg.train.precision != "bfloat16":
            raise ConfigError(f'codec.{key}="{value}" needs train.precision="bfloat16", got '
                              f'"{cfg.train.precision}"; in float32 only codec.gradients can be coded')
