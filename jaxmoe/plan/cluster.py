"""A cluster: the facts from which the time of a task follows, each with where it came from.

α is seconds, β seconds per byte *that one device sends*: for a group of n devices and an operand of b bytes on each,
all_to_all and reduce_scatter send b (n - 1) / n, all_gather b (n - 1), all_reduce 2 b (n - 1) / n (`cost.bytes_sent`).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from ..config import ConfigError, Section

Origin = Literal["measured", "paper", "datasheet", "ours"]
LinkName = Literal["intra", "inter"]
NonNegative = Annotated[float, Field(ge=0)]
AtLeastOne = Annotated[float, Field(ge=1)]


class Fact(Section):
    """origin: "measured" on such devices, from a "paper", from a "datasheet", or a choice of "ours"."""

    origin: Origin


class Device(Fact):
    """launch_seconds: added to every task; what α does not hold."""

    memory_bytes: PositiveInt
    sms: PositiveInt | None = None
    launch_seconds: NonNegative = 0.0


class AlphaBeta(Fact):
    """seconds(n bytes sent) = alpha_seconds + seconds_per_byte * n."""

    alpha_seconds: NonNegative
    seconds_per_byte: PositiveFloat


class Link(Section):
    """Collectives on one link; a kind left out has no cost, and asking for it is an error."""

    all_to_all: AlphaBeta | None = None
    all_gather: AlphaBeta | None = None
    reduce_scatter: AlphaBeta | None = None
    all_reduce: AlphaBeta | None = None


class Matmul(Fact):
    """seconds(n flops) = alpha_seconds + seconds_per_flop * n; a multiply-add is two flops."""

    alpha_seconds: NonNegative
    seconds_per_flop: PositiveFloat


class Memory(Fact):
    """seconds(n bytes read or written) = alpha_seconds + n / bytes_per_second."""

    alpha_seconds: NonNegative
    bytes_per_second: PositiveFloat


class Codec(Fact):
    """Rates count raw bytes; ratio is raw bytes over bytes on the wire."""

    encode_bytes_per_second: PositiveFloat
    decode_bytes_per_second: PositiveFloat
    ratio: AtLeastOne


class Module(Fact):
    """Tasks of one verb, measured with the shapes of a model: seconds = alpha_seconds + seconds_per_unit * n, of n
    flops of a matrix product, and else of n bytes that the task moves or sends."""

    alpha_seconds: NonNegative
    seconds_per_unit: NonNegative


class Contention(Fact):
    """What a compute task and a collective do to each other while both run.

    sms_for_links: streaming multiprocessors that a collective on this link holds. link_slowdown: factor on a
    collective's time beside compute (memory bandwidth). compute_slowdown: factor on compute's time beside a collective;
    left out it is S / (S - c), S = device.sms, c = SMs of the links in use. links_wait: a collective that becomes ready
    while a compute task runs waits for its end, because that task holds the SMs.
    """

    sms_for_links: dict[LinkName, PositiveInt]
    link_slowdown: AtLeastOne = 1.0
    links_wait: bool = False
    compute_slowdown: AtLeastOne | None = None


class Overlap(Fact):
    """efficiency: share of hidden time that is really hidden; 1 is ideal."""

    efficiency: Annotated[float, Field(ge=0, le=1)]


class Cluster(Section):
    """links: mesh axis -> the link that its collectives use. modules: what tasks of a verb take (`cost.module_of`),
    instead of what follows from links, products and memory."""

    name: str
    nodes: PositiveInt
    gpus_per_node: PositiveInt
    gpu: str
    links: dict[str, LinkName]
    device: Device
    intra: Link = Link()
    inter: Link = Link()
    matmul: Matmul
    memory: Memory
    codecs: dict[str, Codec] = {}
    modules: dict[str, Module] = {}
    contention: Contention | None = None
    overlap: Overlap = Overlap(origin="ours", efficiency=1.0)

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.gpus_per_node, self.gpu))

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def collective(self, link: str, kind: str) -> AlphaBeta:
        """Cost of a collective on a link. Raises ConfigError naming the key that the file lacks."""
        found = getattr(getattr(self, link), kind, None)
        if found is None:
            raise ConfigError(f"cluster {self.name!r} must have {link}.{kind}, which the plan needs; got no such table")
        return found

    def to_toml(self) -> str:
        """The file's text; `from_toml` gives an equal cluster."""
        return _toml(self.model_dump(exclude_none=True))

    @staticmethod
    def from_toml(text: str) -> Cluster:
        """Raises ConfigError, one line that names the key."""
        try:
            return Cluster.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as e:
            raise ConfigError(f"a cluster file must be TOML: {e}") from None
        except ValidationError as e:
            raise ConfigError(_message(e)) from None


NAMED: dict[str, type[Fact]] = {"codecs": Codec, "modules": Module}   # tables of tables whose names are free


def as_cluster(cluster: Cluster | str | Path) -> Cluster:
    """A cluster, or the one of this file or shipped name."""
    return cluster if isinstance(cluster, Cluster) else load_cluster(cluster)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file, or one that comes with the library by its name, such as "8x8-h100".

    Raises ConfigError, one line that names the file and the key.

    Example: ``cluster = jaxmoe.load_cluster("8x8-h100"); print(cluster.num_devices)``
    """
    shipped = resources.files("jaxmoe.clusters") / f"{path}.toml"
    source = shipped if shipped.is_file() else Path(path)
    try:
        return Cluster.from_toml(source.read_text())
    except OSError as e:
        names = ", ".join(sorted(f.name.removesuffix(".toml") for f in resources.files("jaxmoe.clusters").iterdir()
                                 if f.name.endswith(".toml")))
        raise ConfigError(f"cluster file {str(path)!r} cannot be read: {e.strerror}; shipped: {names}") from e
    except (ConfigError, UnicodeDecodeError) as e:
        raise ConfigError(f"cluster file {str(path)!r}: {e}") from None


def gpu_description(name: str) -> str:
    """The GPU's description as a text proto, from which XLA compiles for it without one. Raises ConfigError."""
    folder = resources.files("jaxmoe.plan") / "gpus"
    known = sorted(f.name.removesuffix(".txtpb") for f in folder.iterdir() if f.name.endswith(".txtpb"))
    if name not in known:
        raise ConfigError(f"gpu must be one of {', '.join(known)} to compile for it, got {name!r}")
    return (folder / f"{name}.txtpb").read_text()


def _message(error: ValidationError) -> str:
    """One fault as one line: key, what must hold, what was given. Unknown keys first: they may explain missing ones."""
    fault = min(error.errors(), key=lambda f: f["type"] != "extra_forbidden")
    path = [str(p) for p in fault["loc"] if p != "[key]"]
    key = ".".join(path)
    if fault["type"] == "missing":
        return f"key {key} is missing"
    if fault["type"] == "extra_forbidden":
        names = _names(path[:-1])
        near = difflib.get_close_matches(path[-1], names, 1, 0.5)
        return f"unknown key {key}; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}")
    return f"{key}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {fault['input']!r}"


def _names(path: list[str]) -> list[str]:
    """Keys of the table at path."""
    model: Any = Cluster
    for part in path:
        if model is Cluster and part in NAMED:
            model = {part: NAMED[part]}
        elif isinstance(model, dict):
            model = next(iter(model.values()))
        else:
            annotation = model.model_fields[part].annotation
            model = next(t for t in (annotation, *getattr(annotation, "__args__", ())) if hasattr(t, "model_fields"))
    return sorted(model.model_fields)


def _toml(tree: dict[str, Any], path: str = "") -> str:
    """Values first, then tables; short tables of plain values (links, sms_for_links) in line."""
    values = {k: v for k, v in tree.items() if not isinstance(v, dict)}
    inline = {k: v for k, v in tree.items() if isinstance(v, dict) and k in ("links", "sms_for_links")}
    lines = [f"{k} = {json.dumps(v)}" for k, v in values.items()]
    lines += [f"{k} = {{ {', '.join(f'{a} = {json.dumps(b)}' for a, b in v.items())} }}" for k, v in inline.items()]
    text = (f"\n[{path}]\n" if path and lines else "") + "".join(line + "\n" for line in lines)
    return text + "".join(_toml(v, f"{path}.{_key(k)}".lstrip(".")) for k, v in tree.items()
                          if isinstance(v, dict) and k not in inline)


def _key(name: str) -> str:
    """Quoted where TOML asks for it."""
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)
