"""The codec: the same bits come out, payloads equal their definition byte by byte, sizes, no long sums or scatters."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jaxmoe.kernels import exponent_codec as kernel

from jaxmoe import codec
from jaxmoe.measure.codec import bench_codec

FORMATS = ("x4s", "x3p", "x3")
N = 2**16 + 1  # every pattern once, odd, no multiple of a tile
RNG = np.random.default_rng(0)


def bf16(x) -> np.ndarray:
    """uint16 words of the nearest bfloat16, rounded to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


GAUSSIAN = bf16(RNG.standard_normal(N) * 0.02)


def patched(count: int, patterns) -> np.ndarray:
    word_N = GAUSSIAN.copy()
    word_N[RNG.choice(N, count, replace=False)] = patterns
    return word_N


#        words, formats that must take them
CASES = {
    "gaussian": (GAUSSIAN, FORMATS),
    "all patterns": (np.resize(np.arange(2**16).astype(np.uint16), N), ("x3",)),
    "random bits": (RNG.integers(0, 2**16, N).astype(np.uint16), ()),
    "NaN, Inf, -0, subnormal": (patched(40, RNG.choice(
        np.array([0x7F81, 0xFFC1, 0x7FC0, 0x7F80, 0xFF80, 0x8000, 1, 0x807F], np.uint16), 40)), FORMATS),
    "NaN everywhere": (np.full(N, 0x7F81, np.uint16), ()),
    "subnormals": (RNG.integers(1, 0x80, N).astype(np.uint16), FORMATS),
    "zeros": (np.zeros(N, np.uint16), FORMATS),
    "constant": (np.full(N, 0xBF80, np.uint16), FORMATS),
    "30 % zero rows": (np.where(np.arange(N) // 512 % 10 < 3, 0, GAUSSIAN).astype(np.uint16), FORMATS),
    "one 1e30 in each block": (np.where(np.arange(N) % 256 == 17, bf16(1e30), GAUSSIAN), ("x3",)),
    "400 random patterns": (patched(400, RNG.integers(0, 2**16, 400)), ()),
    "20 random patterns": (patched(20, RNG.integers(0, 2**16, 20)), FORMATS),
    "a scale per row": (bf16(RNG.standard_normal(N) * np.exp(1.5 * RNG.standard_normal(129)).repeat(512)[:N]), FORMATS),
}


@cache
def coder(codec_name: str, dtype: str, n: int, fmt: kernel.Format | None = None):
    fmt = fmt or kernel.resolve(codec_name, dtype)
    return fmt, jax.jit(partial(kernel.encode, fmt=fmt)), jax.jit(partial(kernel.decode, n=n, fmt=fmt))


def check(word_PN: np.ndarray, fmt: kernel.Format, encode, decode) -> bool:
    """Payload and flag are the definition's; what did not overflow comes back. Whether nothing overflowed."""
    before = word_PN.copy()
    payload_PY, flags = encode(jnp.asarray(word_PN))
    back_PN = decode(payload_PY)
    assert np.array_equal(word_PN, before)
    assert payload_PY.shape == (len(word_PN), kernel.part_bytes(fmt, word_PN.shape[1]))
    for p, word_N in enumerate(word_PN):
        payload_Y, overflow = kernel.reference_encode(word_N, fmt)
        assert np.array_equal(payload_PY[p], payload_Y)
        assert flags.overflow_P[p] == overflow == (flags.used_P[p] > 1)
        if not overflow:
            assert np.array_equal(back_PN[p], word_N)
            assert np.array_equal(kernel.reference_decode(payload_Y, word_N.size, fmt), word_N)
    return not flags.overflow_P.any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_case_is_bit_exact(fmt, name):
    word_N, takes = CASES[name]
    taken = check(word_N[None], *coder(fmt, "bfloat16", N))
    assert taken or fmt not in takes
    assert not (taken and name == "random bits")


@pytest.mark.parametrize("name", ("gaussian", "30 % zero rows", "random bits"))
@pytest.mark.parametrize("fmt", ("x3p", "x3p:as-bf16"))
def test_float32_is_bit_exact(fmt, name):
    """as-bf16 takes 16 low bits that are zero in 99.75 % of the values; the other tier takes any."""
    low_N = RNG.integers(0, 2**16, N, dtype=np.uint32)
    if fmt.endswith("as-bf16"):
        low_N *= RNG.random(N) < 0.0025
    word_N = CASES[name][0].astype(np.uint32) << 16 | low_N
    assert check(word_N[None], *coder(fmt, "float32", N)) == (name != "random bits")


@pytest.mark.parametrize("n", (0, 4097))
@pytest.mark.parametrize("fmt", ("x4s", "x3p", "x3", "raw"))
def test_parts_of_any_length(fmt, n):
    assert check(np.stack([GAUSSIAN[:n], GAUSSIAN[n : 2 * n]]), *coder(fmt, "bfloat16", n))


PATTERNS = {
    "gaussian": lambda rng, n: bf16(rng.standard_normal(n)),
    "wide": lambda rng, n: bf16(rng.standard_normal(n) * 2.0 ** rng.integers(-60, 60, n)),
    "bits": lambda rng, n: rng.integers(0, 2**16, n).astype(np.uint16),
    "few": lambda rng, n: rng.choice(np.array([0, 0x3F80, 0x8001, 0x7F81], np.uint16), n),
}
# Capacities from none to all: a row for every candidate never overflows.
ALL, NONE = kernel.Pool(16, 1, 1), kernel.Pool(16, 0, 0)
FUZZED = [
    (replace(kernel.resolve("x4s", "bfloat16"), raw=ALL), 4099),
    (replace(kernel.resolve("x4s", "bfloat16"), raw=NONE), 1),
    (replace(kernel.resolve("x3p", "bfloat16"), raw=NONE, plane=kernel.Pool(2, 1, 1)), 8192),
    (replace(kernel.resolve("x3p", "bfloat16"), raw=ALL, plane=kernel.Pool(2, 0, 0)), 77),
    (replace(kernel.resolve("x3", "bfloat16"), escapes=kernel.Pool(1, 1, 1)), 4095),
    (kernel.resolve("x4s:as-bf16", "float32"), 300),
]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FUZZED), st.sampled_from(sorted(PATTERNS)), st.integers(0, 2**32 - 1),
       st.lists(st.tuples(st.integers(0, 2**13), st.integers(0, 2**16 - 1)), max_size=40))
def test_fuzzed_words_and_capacities(what, pattern, seed, edits):
    fmt, n = what
    word_N = PATTERNS[pattern](np.random.default_rng(seed), n)
    for at, word in edits:
        word_N[at % n] = word
    word_PN = np.stack([word_N, word_N[::-1]])
    if fmt.low != "none":
        word_PN = word_PN.astype(np.uint32) << 16
        word_PN[0, :: 1 + seed % 50] |= 5
    taken = check(word_PN, *coder("", "", n, fmt))
    assert taken or any(pool and pool.share < 1 for pool in (fmt.raw, fmt.plane, fmt.escapes))


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(st.sampled_from((ml_dtypes.bfloat16, np.float32)).map(np.dtype),
                  st.sampled_from(((), (0,), (3, 0), (1,), (7, 5), (2, 2, 2))), elements=st.integers(0, 3)),
       st.sampled_from(FORMATS))
def test_packets_of_small_shapes_go_raw(x, fmt):
    packet = codec.encode(x, fmt)
    back = codec.decode(packet)
    assert packet.fell_back and packet.wire_bytes == packet.raw_bytes == x.nbytes
    assert back.shape == x.shape and back.dtype == x.dtype and np.array_equal(np.asarray(back), x)


@pytest.mark.parametrize("fmt", FORMATS)
def test_packet(fmt):
    x_SD = jnp.asarray(GAUSSIAN[:-1].view(ml_dtypes.bfloat16)).reshape(128, 512).T[::2]  # not contiguous
    packet = codec.encode(x_SD, fmt)
    assert not packet.fell_back and packet.raw_bytes == 2**16 and packet.wire_bytes < packet.raw_bytes / 1.2
    assert np.array_equal(codec.words(codec.decode(packet)), codec.words(x_SD))
    noise = jnp.asarray(CASES["random bits"][0].view(ml_dtypes.bfloat16))
    packet = codec.encode(noise, fmt)
    assert packet.fell_back and packet.wire_bytes == packet.raw_bytes
    assert np.array_equal(codec.words(codec.decode(packet)), codec.words(noise))


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_part_overflows_alone(fmt):
    word_PN = np.stack([GAUSSIAN[:4097], CASES["random bits"][0][:4097]])
    fmt, encode, decode = coder(fmt, "bfloat16", 4097)
    payload_PY, flags = encode(jnp.asarray(word_PN))
    assert flags.overflow_P.tolist() == [False, True]
    assert np.array_equal(decode(payload_PY)[0], word_PN[0])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 2**32 - 1), st.sampled_from((0, 255, None)))
@example("x3", 0, None)
def test_any_bytes_decode_and_touch_only_their_part(fmt, seed, fill):
    fmt, encode, decode = coder(fmt, "bfloat16", 4097)
    payload_PY = np.array(encode(jnp.asarray(np.stack([GAUSSIAN[:4097], GAUSSIAN[:4097]])))[0])
    rng = np.random.default_rng(seed)
    payload_PY[0] = rng.integers(0, 256, payload_PY.shape[1]) if fill is None else fill
    back_PN = decode(jnp.asarray(payload_PY))
    assert back_PN.shape == (2, 4097)
    assert np.array_equal(back_PN[1], GAUSSIAN[:4097])


@pytest.mark.parametrize(("fmt", "least"), (("x4s", 1.29), ("x3p", 1.36), ("x3", 1.39)))
def test_sizes_on_gaussians_at_every_phase(fmt, least):
    """Messages of 2**18 values; pools at most 80 % full, whatever sigma."""
    n = 2**18
    fmt, encode, _ = coder(fmt, "bfloat16", n)
    assert 2 * n / kernel.part_bytes(fmt, n) >= least
    noise_N = RNG.standard_normal(n)
    for phase in np.arange(10) / 10:
        _, flags = encode(jnp.asarray(bf16(noise_N * 0.02 * 2**phase))[None])
        assert flags.used_P[0] < 0.8


@pytest.mark.parametrize("fmt", ("x4s", "x3p"))
def test_no_long_sum_and_no_long_scatter(fmt):
    """No prefix sum over, and no scatter of, more than a sixteenth of the values."""
    n = 2**18
    fmt, encode, decode = coder(fmt, "bfloat16", n)
    payload = jax.ShapeDtypeStruct((1, kernel.part_bytes(fmt, n)), jnp.uint8)
    for closed in (jax.make_jaxpr(encode)(jax.ShapeDtypeStruct((1, n), jnp.uint16)), jax.make_jaxpr(decode)(payload)):
        names = set()
        for eqn in _equations(closed.jaxpr):
            names.add(eqn.primitive.name)
            if eqn.primitive.name.startswith("cum"):
                assert eqn.invars[0].aval.shape[eqn.params["axis"]] <= n // 256
            if eqn.primitive.name.startswith("scatter"):
                assert eqn.invars[2].aval.size <= n // 16
        assert "cumsum" in names and "sort" not in names


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
            if hasattr(value, "jaxpr"):
                yield from _equations(value.jaxpr)


def test_sum_adds_in_order():
    word_PN = np.stack([GAUSSIAN[i : 4097 + i] for i in (0, 5, 9)])
    fmt, encode, _ = coder("x4s", "bfloat16", 4097)
    total_N = jax.jit(partial(kernel.decode_sum, n=4097, fmt=fmt))(encode(jnp.asarray(word_PN))[0])
    x_PN = (word_PN.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(total_N, (x_PN[0] + x_PN[1]) + x_PN[2])


def test_bench_has_a_row_a_format_under_the_bound():
    x = jnp.asarray(GAUSSIAN[:-1].view(ml_dtypes.bfloat16))
    (row,) = bench_codec({"weights": x}, ("x4s",), peers=False, repeats=1)
    assert row["format"] == "x4s" and row["array"] == "weights" and not row["fell_back"]
    assert 1.2 < row["ratio"] < row["bound_ratio"] < 1.53 and 0 < row["escape_share"] < 0.04
    assert min(row["encode_bytes_per_second"], row["decode_bytes_per_second"]) > 0


@pytest.mark.parametrize(("dtype", "name", "words"), (
    ("bfloat16", "x4", 'Did you mean "x4s"'), ("float16", "x4s", "needs bfloat16 or float32, got float16"),
    ("bfloat16", "x3p:as-bf16", 'Use codec="x3p"'), ("int32", "x3", "needs bfloat16 or float32, got int32")))
def test_bad_input_is_named(dtype, name, words):
    with pytest.raises(ValueError, match=words):
        codec.encode(jnp.zeros(4, dtype), name)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="must divide x's first dim"):
        codec.encode_for(jnp.zeros((3, 4)), 2, "x4s")
    with pytest.raises(ValueError, match="must be uint8"):
        codec.decode_from(jnp.zeros((2, 4), jnp.uint8), (8,), jnp.bfloat16, "x4s")
    with pytest.raises(ValueError, match="2\\*\\*31"):
        codec.wire_bytes((2**31,), jnp.bfloat16, "x4s")
