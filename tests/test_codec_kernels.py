"""The GPU kernels without a GPU: compiled for an H100, and, where the interpreter is public, run bit for bit on CPU."""

from functools import partial
from importlib import resources
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding
from jaxmoe.kernels.exponent_codec import mosaic, resolve, xla

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 2**16, (2, 16, 256)).astype(np.uint16)
WORDS[0] = RNG.standard_normal((16, 256)).astype(np.float32).view(np.uint32) >> 16
WORDS[1, :8] = 0
TOTAL = RNG.standard_normal(WORDS.shape).astype(np.float32)


def arguments(fmt):
    dense = xla.encode(jnp.asarray(WORDS), fmt)
    return {"encode": (jnp.asarray(WORDS),), "decode": (dense,), "decode_add": (jnp.asarray(TOTAL), dense)}


@pytest.mark.skipif(find_spec("jax_plugins.xla_cuda13") is None if find_spec("jax_plugins") else True,
                    reason="compiling for GPUs needs jax-cuda13-plugin, jax-cuda13-pjrt: pip install 'jaxmoe[prove]'")
@pytest.mark.parametrize("verb", ("encode", "decode", "decode_add"))
@pytest.mark.parametrize("name", ("x4s", "x3p"))
def test_compiles_for_h100(name, verb):
    fmt = resolve(name, "bfloat16")
    h100 = (resources.files("jaxmoe.plan") / "gpus" / "h100.txtpb").read_text()
    device = topologies.get_topology_desc("h100", "cuda", target_config=h100, topology="1x1x1").devices[0]
    there = NamedSharding(Mesh(np.array([device]), ("x",)), jax.P())
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arguments(fmt)[verb])
    compiled = jax.jit(partial(getattr(mosaic, verb), fmt=fmt)).lower(*args).compile()
    assert compiled.as_text().count("custom-call") == 1


@pytest.mark.skipif(not hasattr(plgpu, "force_gpu_interpret_mode"),
                    reason="interpreting Mosaic GPU kernels is public from jax 0.12 on")
@pytest.mark.parametrize("verb", ("encode", "decode", "decode_add"))
@pytest.mark.parametrize("name", ("x4s", "x3p"))
def test_interpreted_equals_xla_bit_for_bit(name, verb):
    fmt = resolve(name, "bfloat16")
    args = arguments(fmt)[verb]
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = getattr(mosaic, verb)(*args, fmt=fmt)
    expected = getattr(xla, verb)(*args, fmt=fmt)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_x3_is_declined():
    with pytest.raises(NotImplementedError, match="x3"):
        mosaic.encode(jnp.asarray(WORDS), resolve("x3", "bfloat16"))
