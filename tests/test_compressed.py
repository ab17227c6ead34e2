"""Coded collectives equal uncoded ones bit for bit, forward and backward, whoever overflows; 8 devices, 2 nodes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxmoe import codec, collectives
from jaxmoe.compat import vary_over

AXES = ("node", "gpu")
ROWS, WIDTH = 16, 640
MESH = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
RNG = np.random.default_rng(0)


def bf16(x) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


GAUSSIAN = bf16(RNG.standard_normal((8 * ROWS, WIDTH)) * 0.02)
NOISE = RNG.integers(0, 2**16, (8 * ROWS, WIDTH)).astype(np.uint16).view(ml_dtypes.bfloat16)
PATTERNS = GAUSSIAN.copy()
PATTERNS.view(np.uint16)[::8, ::80] = [0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 1, 0x807F, 0]
ALONE = GAUSSIAN.copy()
ALONE[5 * ROWS : 6 * ROWS] = NOISE[5 * ROWS : 6 * ROWS]  # device 5's values do not fit
CASES = {"gaussian": GAUSSIAN, "NaN, Inf, -0, subnormal": PATTERNS, "one overflows alone": ALONE, "all overflow": NOISE}


def calls(**options):
    """name -> collective of x [ROWS, WIDTH]."""
    return {
        "all_to_all": lambda x, **o: collectives.all_to_all(x, AXES, 0, 1, **options, **o),
        "all_gather": lambda x, **o: collectives.all_gather(x, AXES, 1, **options, **o),
        "reduce_scatter": lambda x, **o: collectives.reduce_scatter(x, AXES, 1, **options, **o),
        "all_reduce": lambda x, **o: collectives.all_reduce(x, AXES, **options, **o),
    }


@cache
def program(name: str, options: tuple):
    """x, cotangent (a block a device) -> words of y and x's gradient, both passes' counters, one row a device."""
    call = calls(**dict(options))[name]

    def body(x, g):
        def forward(x, sink):
            return call(x, counters=True, sink=sink)

        sink = jax.tree.map(lambda c: jax.lax.pcast(c, AXES, to="varying"), collectives.no_counters())
        y, pull, counters = jax.vjp(forward, x, sink, has_aux=True)
        g = jnp.resize(g, y.shape)
        g = jax.lax.psum(g.astype(jnp.float32), AXES).astype(g.dtype) if name == "all_reduce" else g
        x_gradient, back = pull(g)
        rows = [jnp.stack(c)[None] for c in (counters, back)]
        words = [codec.words(a)[None] for a in (y, x_gradient)]
        return vary_over((words, rows), AXES)

    return jax.jit(jax.shard_map(body, mesh=MESH, in_specs=jax.P(AXES), out_specs=jax.P(AXES), check_vma=True))


@cache
def result(name: str, case: str, **options):
    x = CASES[case]
    words, rows = program(name, tuple(options.items()))(x, np.roll(x, 3, 1))
    return jax.tree.map(np.asarray, (words, [collectives.Counters(*r.T) for r in rows]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize(("fmt", "nodes"), (("x4s", AXES), ("x3p", ("node",))), ids=("flat", "between nodes"))
def test_equal_to_uncoded_in_value_and_gradient(fmt, nodes, name, case):
    before = CASES[case].copy()
    words, counters = result(name, case, codec=fmt, codec_axes=nodes)
    uncoded, none = result(name, case, codec="raw", codec_axes=nodes)
    assert np.array_equal(CASES[case].view(np.uint16), before.view(np.uint16))
    for got, expected in zip(words, uncoded, strict=True):
        assert np.array_equal(got, expected)
    passes = 1 if name == "all_reduce" else 2
    for one, raw in zip(counters[:passes], none[:passes], strict=True):
        fell = one.fallbacks > 0
        if nodes == AXES and name in ("all_to_all", "all_gather"):
            assert fell.tolist() == ["overflow" in case] * 8
        assert (one.raw_bytes == raw.raw_bytes).all() and (raw.fallbacks == 0).all()
        assert ((one.pool_used > 1) <= fell).all()


@pytest.mark.parametrize("name", ("all_to_all", "all_gather"))
def test_equal_to_xla(name):
    """XLA:CPU changes NaN payloads of bfloat16 on the way; everything else arrives the same."""
    def body(x):
        y = calls()[name](x)
        return codec.words(y)[None]

    xla = jax.jit(jax.shard_map(body, mesh=MESH, in_specs=jax.P(AXES), out_specs=jax.P(AXES)))(GAUSSIAN)
    for options in (dict(codec="x4s", codec_axes=AXES), dict(codec="x3p", codec_axes=("node",))):
        assert np.array_equal(result(name, "gaussian", **options)[0][0], xla)


def test_reductions_add_in_order():
    x_PSD = GAUSSIAN.reshape(8, ROWS, WIDTH).astype(np.float32)
    total = x_PSD[0]
    for x_SD in x_PSD[1:]:
        total = total + x_SD
    expected = bf16(total).view(np.uint16)
    assert np.array_equal(result("all_reduce", "gaussian", codec="x4s", codec_axes=AXES)[0][0],
                          np.broadcast_to(expected, (8, ROWS, WIDTH)))
    parts = result("reduce_scatter", "gaussian", codec="x4s", codec_axes=AXES)[0][0]
    assert np.array_equal(np.concatenate(list(parts), 1), expected)


def test_deferred_flag_has_no_conditional():
    """Right where all fits; where one device's values do not, that device says so, forward and backward."""
    options = dict(codec="x4s", codec_axes=AXES, check="deferred")
    words, _ = result("all_to_all", "gaussian", **options)
    assert np.array_equal(words[0], result("all_to_all", "gaussian", codec="raw", codec_axes=AXES)[0][0])
    for counters in result("all_to_all", "one overflows alone", **options)[1]:
        assert counters.fallbacks.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    run = program("all_to_all", tuple(options.items()))
    assert "stablehlo.case" not in run.lower(GAUSSIAN, GAUSSIAN).as_text()


def test_conditional_depends_on_an_agreed_flag():
    assert "stablehlo.case" in program("all_to_all", (("codec", "x4s"), ("codec_axes", AXES))).lower(
        GAUSSIAN, GAUSSIAN).as_text()


@pytest.mark.parametrize(("options", "words"), (
    (dict(codec="x5"), "codec must be one of"), (dict(codec="x4s", check="never"), "check must be one of"),
    (dict(codec="x4s", codec_axes=("rack",)), "codec_axes=")))
def test_bad_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(jax.shard_map(partial(calls(**options)["all_to_all"]), mesh=MESH, in_specs=jax.P(AXES),
                                     out_specs=jax.P(AXES)), GAUSSIAN)
