"""Cluster files: read, written, refused in one line that names the key; seconds of tasks."""

from pathlib import Path

import pytest

from jaxmoe.config import ConfigError
from jaxmoe.plan.cluster import Cluster, gpu_description, load_cluster
from jaxmoe.plan.cost import bytes_sent, durations, seconds
from jaxmoe.plan.simulate import slowdown
from jaxmoe.plan.tasks import Pass, Task

FILES = sorted(Path(__file__).parents[1].glob("configs/clusters/*.toml"))
MINIMAL = """
name = "two"
nodes = 2
gpus_per_node = 2
gpu = "h100"
links = { gpu = "intra", node = "inter" }
[device]
origin = "ours"
memory_bytes = 1000
sms = 10
[inter.all_to_all]
origin = "measured"
alpha_seconds = 1.0
seconds_per_byte = 0.5
[intra.all_to_all]
origin = "measured"
alpha_seconds = 2
seconds_per_byte = 0.1
[matmul]
origin = "ours"
alpha_seconds = 1.0
seconds_per_flop = 0.25
[memory]
origin = "ours"
alpha_seconds = 0.5
bytes_per_second = 4
[codecs.x4s]
origin = "ours"
encode_bytes_per_second = 8
decode_bytes_per_second = 16
ratio = 1.5
[contention]
origin = "ours"
sms_for_links = { intra = 2, inter = 1 }
link_slowdown = 1.5
[overlap]
origin = "paper"
efficiency = 0.7
"""


def task(kind, streams=("compute",), **sizes):
    return Task("t", "verb", streams, (), ("y",), kind, **sizes)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_shipped_files(path):
    cluster = load_cluster(path)
    assert cluster.name == path.stem
    assert set(cluster.links.values()) <= {"intra", "inter"}
    again = Cluster.from_toml(cluster.to_toml())
    assert again == cluster and hash(again) == hash(cluster)


def test_all_are_shipped():
    assert {p.stem for p in FILES} >= {"fsmoe-a", "fsmoe-b", "8x8-h100", "8x8-h200", "cpu-8"}


@pytest.mark.parametrize("old, new, says", [
    ("gpus_per_node", "gpu_per_node", "unknown key gpu_per_node; did you mean 'gpus_per_node'?"),
    ("nodes = 2\n", "", "key nodes is missing"),
    ("[codecs.x4s]", "[codecs.x4s]\nrate = 1", "unknown key codecs.x4s.rate; did you mean 'ratio'?"),
    ("sms = 10", "smx = 10", "unknown key device.smx; did you mean 'sms'?"),
    ("nodes = 2", 'nodes = "two"', "nodes: input should be a valid integer, got 'two'"),
    ("ratio = 1.5", "ratio = 0.5", "codecs.x4s.ratio: input should be greater than or equal to 1, got 0.5"),
    ('node = "inter"', 'node = "wan"', "links.node: input should be 'intra' or 'inter', got 'wan'"),
    ("alpha_seconds = 2", "alpha_seconds = -2", "intra.all_to_all.alpha_seconds: input should be greater"),
    ('origin = "paper"', 'origin = "hearsay"', "overlap.origin: input should be 'measured', 'paper'"),
    ('name = "two"', "name =", "a cluster file must be TOML"),
])
def test_bad_file_is_refused_in_one_line(old, new, says):
    with pytest.raises(ConfigError) as error:
        Cluster.from_toml(MINIMAL.replace(old, new, 1))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_missing_file_is_named():
    with pytest.raises(ConfigError, match="cluster file 'nowhere.toml' cannot be read"):
        load_cluster("nowhere.toml")


def test_seconds_of_tasks():
    cluster = Cluster.from_toml(MINIMAL)
    assert seconds(task("matmul", flops=8), cluster) == 3
    assert seconds(task("matmul", flops=8, bytes=16), cluster) == 5
    assert seconds(task("memory", bytes=8), cluster) == 2.5
    assert seconds(task("all_to_all", ("inter",), bytes=8), cluster) == 5
    assert seconds(task("encode:x4s", bytes=8), cluster) == 1.5
    assert seconds(task("decode:x4s", bytes=8), cluster) == 1
    flat = task("all_to_all", ("intra", "inter"), bytes=12, between=2 / 3)
    assert seconds(flat, cluster) == 2 + max(0.1 * 4, 0.5 * 8)
    assert durations(Pass((flat,)), cluster) == {"t": 6}


def test_what_the_file_lacks_is_named():
    cluster = Cluster.from_toml(MINIMAL)
    with pytest.raises(ConfigError, match="must have inter.all_reduce"):
        seconds(task("all_reduce", ("inter",)), cluster)
    with pytest.raises(ValueError, match="must have codecs.x3, .* got x4s"):
        seconds(task("encode:x3"), cluster)
    with pytest.raises(ValueError, match="kind of task 't' must be one of matmul"):
        seconds(task("dance"), cluster)
    with pytest.raises(ValueError, match="must occupy intra or inter"):
        seconds(task("all_to_all"), cluster)


def test_slowdown_from_sms():
    slow = slowdown(Cluster.from_toml(MINIMAL))
    assert slow is not None
    assert (slow.beside_intra, slow.beside_inter, slow.beside_both, slow.link) == (10 / 8, 10 / 9, 10 / 7, 1.5)
    with pytest.raises(ValueError, match="device.sms of cluster 'two' must be more than the 3"):
        slowdown(Cluster.from_toml(MINIMAL.replace("sms = 10", "sms = 3")))


def test_bytes_sent():
    assert [bytes_sent(k, 8, 4) for k in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")] == [6, 24, 6, 12]
    assert bytes_sent("all_reduce", 8, 1) == 0


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_gpu_descriptions(name):
    assert "core_count" in gpu_description(name)


def test_unknown_gpu_is_named():
    with pytest.raises(ConfigError, match="gpu must be one of a100, b200, h100, h200 to compile for it, got 'cpu'"):
        gpu_description("cpu")
