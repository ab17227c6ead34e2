"""A cluster file fitted on eight simulated devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxmoe.measure.profile import as_text, fit, profile
from jaxmoe.plan.cluster import Cluster


def test_fit_recovers_a_line():
    amounts = [1e3, 1e4, 1e5, 1e6]
    found = fit("x", amounts, [1e-5 + 2e-9 * n for n in amounts])
    assert found.alpha_seconds == pytest.approx(1e-5) and found.seconds_per_unit == pytest.approx(2e-9)
    assert found.r2 == pytest.approx(1)


def test_fit_has_no_negative_part():
    assert fit("x", [1.0, 2.0, 3.0], [0.5, 2.0, 3.5]).alpha_seconds == 0
    with pytest.raises(ValueError, match="x must take longer for larger amounts"):
        fit("x", [1.0, 2.0, 3.0], [3.0, 2.0, 1.0])


def test_profile_on_simulated_devices():
    mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    cluster, fits = profile(mesh, {"node": "inter", "gpu": "intra"}, "here", (2**14, 2**23), (64, 512), repeats=3)
    assert {f.what for f in fits} == {"matmul", "memory"} | {
        f"{link}.{kind}" for link in ("intra", "inter")
        for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")}
    assert all(np.isfinite(f.r2) for f in fits)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.matmul.origin) == (2, 4, "measured")
    assert cluster.inter.all_to_all is not None and cluster.inter.all_to_all.seconds_per_byte > 0
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert "inter.all_reduce" in as_text(fits)
