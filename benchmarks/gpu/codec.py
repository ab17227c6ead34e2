"""Check every codec kernel bit for bit on this GPU, then time it beside the XLA form and a copy.

    python benchmarks/gpu/codec.py

Needs one GPU of the Hopper generation or later; takes under 5 minutes. Prints one table, with hardware, versions and
date. Times are medians of 20 runs after 3; GB/s are raw bytes over time; a copy of the same bytes is the bound.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxmoe.kernels.exponent_codec import mosaic, payload, reference_encode, resolve, xla

BACKENDS = {"mosaic": mosaic, "xla": xla}


def check(fmt) -> None:
    """Both backends give the definition's payload, the words back and the same float32 sum, for words of every kind."""
    rng = np.random.default_rng(0)
    normal = (rng.standard_normal(2**16 + 77) * 0.02).astype(np.float32).view(np.uint32) >> 16
    special = normal.copy()
    special[::4001] = rng.integers(0, 2**16, special[::4001].size)
    for word_N in (normal, special, np.arange(2**16), rng.integers(0, 2**16, 5000), np.zeros(4096)):
        sums = [check_words(word_N.astype(np.uint16), fmt, backend) for backend in BACKENDS.values()]
        assert np.array_equal(*sums), (fmt.name, "decode_add")


def check_words(word_N: np.ndarray, fmt, backend) -> np.ndarray:
    """Bits of 1 + the words, decoded and added."""
    n, word_PN = word_N.size, jnp.asarray(np.stack([word_N, word_N[::-1]]))
    payload_PY, flags = jax.jit(lambda w: payload.encode(w, fmt, backend.encode))(word_PN)
    expected_Y, overflow = reference_encode(word_N, fmt)
    assert np.array_equal(payload_PY[0], expected_Y) and bool(flags.overflow_P[0]) == overflow, (fmt.name, backend)
    back_PN = jax.jit(lambda p: payload.decode(p, n, fmt, backend.decode))(payload_PY)
    assert flags.overflow_P.any() or np.array_equal(back_PN, word_PN), (fmt.name, backend)
    one_TRW = jnp.ones((-(-n // 4096), 16, 256), jnp.float32)
    add = jax.jit(lambda t, p: payload.decode_add(t, p, n, fmt, backend.decode_add))
    return np.asarray(add(one_TRW, payload_PY[0])).view(np.uint32)


def seconds(call: Callable, *args) -> float:
    run = jax.jit(call)
    for _ in range(3):
        jax.block_until_ready(run(*args))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rows(fmt, n: int):
    """(verb, backend, seconds) of whole verbs, pools included, and of the dense kernels alone."""
    word_PN = jax.lax.bitcast_convert_type(
        (0.02 * jax.random.normal(jax.random.key(0), (1, n))).astype(jnp.bfloat16), jnp.uint16)
    word_XRW = word_PN.reshape(-1, 16, 256)
    payload_PY, _ = payload.encode(word_PN, fmt, xla.encode)
    total_TRW = jnp.zeros((n // 4096, 16, 256), jnp.float32)
    dense = xla.encode(word_XRW, fmt)
    for name, b in BACKENDS.items():
        yield "encode", name, seconds(lambda w, b=b: payload.encode(w, fmt, b.encode), word_PN)
        yield "decode", name, seconds(lambda p, b=b: payload.decode(p, n, fmt, b.decode), payload_PY)
        yield "decode_add", name, seconds(lambda t, p, b=b: payload.decode_add(t, p, n, fmt, b.decode_add),
                                          total_TRW, payload_PY[0])
        yield "encode, dense part", name, seconds(lambda w, b=b: b.encode(w, fmt), word_XRW)
        yield "decode, dense part", name, seconds(lambda d, b=b: b.decode(d, fmt), dense)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=int, default=2**26, help="bfloat16 values of the message, a multiple of 4096")
    n = parser.parse_args().values
    device = jax.devices()[0]
    if device.platform != "gpu" or float(device.compute_capability) < 9:
        raise SystemExit(f"needs a GPU of compute capability 9.0 or more, found {device.device_kind}")
    formats = [resolve(name, "bfloat16") for name in ("x4s", "x3p")]
    for fmt in formats:
        check(fmt)
    copy = seconds(lambda x: x ^ 1, jnp.zeros(n, jnp.uint16))
    print(f"{device.device_kind}, jax {jax.__version__}, {datetime.date.today()}, {n} values, all checks bit-exact")
    print("| format | verb | backend | GB/s | of copy |\n" + "| --- " * 5 + "|")
    print(f"| | copy | xla | {2 * n / copy / 1e9:.0f} | 100 % |")
    for fmt in formats:
        for verb, name, took in rows(fmt, n):
            print(f"| {fmt.name} | {verb} | {name} | {2 * n / took / 1e9:.0f} | {copy / took:.0%} |")


if __name__ == "__main__":
    main()
