"""Timelines as pictures, traces and text."""

import json

import pytest

from jaxmoe.plan import draw
from jaxmoe.plan.simulate import join, simulate_pass
from jaxmoe.plan.tasks import Pass, Task


@pytest.fixture
def timeline():
    tasks = (Task("dispatch.0", "dispatch", ("intra", "inter"), (), ("a",), "all_to_all", bytes=8),
             Task("experts.0", "experts", ("compute",), ("a",), ("b",), "matmul", flops=4),
             Task("odd.0", "odd", ("inter",), ("a",), ("c",), "all_to_all"))
    seconds = {"dispatch.0": 1e-3, "experts.0": 2e-3, "odd.0": 1e-3}
    return join([simulate_pass(Pass(tasks), [t.name for t in tasks], seconds)] * 2)


def test_png(timeline, tmp_path):
    draw.save_png(timeline, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_trace_has_every_task_on_each_of_its_streams(timeline):
    events = json.loads(draw.trace(timeline))["traceEvents"]
    slices = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["name"] != "exposed"]
    assert len(slices) == 8
    assert ("dispatch.0", 1, 0, pytest.approx(1000)) in slices and ("dispatch.0", 2, 0, pytest.approx(1000)) in slices
    exposed = [e for e in events if e["name"] == "exposed"]
    assert sum(e["dur"] for e in exposed) == pytest.approx(timeline.exposed_seconds * 1e6)


def test_table(timeline):
    text = draw.table(timeline)
    assert text.startswith("6 ms, bound 6 ms (+0.0%), exposed communication 2 ms")
    assert "intra+inter  dispatch.0" in text
    assert text.splitlines()[7].endswith("odd.0       experts.0")
    assert "and 4 more tasks" in draw.table(timeline, max_rows=2)
