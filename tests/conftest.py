"""Eight simulated CPU devices for every test."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"   # programs are compiled in half the time, and run a few times

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def x64():
    """64-bit types for one test."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


MAPPINGS = Path("/proc/self/maps")
LIMIT = Path("/proc/sys/vm/max_map_count")


@pytest.fixture(autouse=True)
def programs_within_the_limit():
    """Compiled programs take memory mappings, of which Linux allows a process 65,530: at the next one XLA crashes. So
    forget them at half as many."""
    yield
    if LIMIT.exists() and MAPPINGS.read_bytes().count(b"\n") > int(LIMIT.read_text()) // 2:
        jax.clear_caches()
