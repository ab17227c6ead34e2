"""Rates and ratios of the codec on the present device, with two general compressors and the entropy bound beside them.

A rate is raw bytes / second, median of the repeats. Compressors that are not installed are left out.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import codec
from .timing import seconds_of

FORMATS = ("x4s", "x3p", "x3")


def bench_codec(arrays: dict[str, jax.Array] | None = None, formats: tuple[str, ...] = FORMATS,
                peers: bool = True, repeats: int = 7) -> list[dict[str, Any]]:
    """One row an array and format, zipnn and zstd (level 1) included if peers.

    arrays: bfloat16 by name; by default 2**21 normally distributed values. Keys: array, format, ratio (raw / wire),
    encode_bytes_per_second, decode_bytes_per_second, pool_used (share of the fullest pool), fell_back, escape_share (of
    exponents outside the likeliest seven), bound_ratio (16 / (8 + entropy of the exponents in bits), for the array).

        rows = bench_codec({"weights": w_DF.astype(jnp.bfloat16)})
    """
    rows = []
    for name, x in (arrays or {"normal": _normal(2**21)}).items():
        x = jnp.asarray(x)
        shared = {"array": name, "bound_ratio": _bound(x), "escape_share": _escape_share(x)}
        rows += [shared | _format_row(x, fmt, repeats) for fmt in formats]
        rows += [shared | row for row in (_peer_rows(x, repeats) if peers else ())]
    return rows


def _format_row(x: jax.Array, fmt: str, repeats: int) -> dict[str, Any]:
    encode = jax.jit(lambda x: codec.encode_for(x[None], 1, fmt))
    decode = jax.jit(lambda payload_PY: codec.decode_from(payload_PY, x.shape, x.dtype, fmt)[0])
    payload_PY, flags = encode(x)
    packet = codec.encode(x, fmt)
    return _row(fmt, x.nbytes, packet.wire_bytes, lambda: encode(x), lambda: decode(payload_PY), repeats) | {
        "pool_used": float(flags.used_P[0]), "fell_back": packet.fell_back}


def _peer_rows(x: jax.Array, repeats: int):
    raw = np.asarray(x).tobytes()
    for name, make in (("zipnn", _zipnn), ("zstd", _zstd)):
        if find_spec({"zstd": "zstandard"}.get(name, name)):
            compress, decompress = make()
            packed = bytes(compress(raw))
            assert bytes(decompress(packed)) == raw
            yield _row(name, len(raw), len(packed), partial(compress, raw), partial(decompress, packed), repeats)


def _zipnn() -> tuple[Callable, Callable]:
    import zipnn  # pyright: ignore[reportMissingImports]

    tool = zipnn.ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    # It overwrites what it compresses, so it is given a copy.
    return lambda raw: tool.compress(bytearray(raw)), tool.decompress


def _zstd() -> tuple[Callable, Callable]:
    import zstandard  # pyright: ignore[reportMissingImports]

    return zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress


def _row(name: str, raw_bytes: int, wire_bytes: int, encode: Callable, decode: Callable, repeats: int) -> dict:
    seconds, spread = seconds_of({"encode": encode, "decode": decode}, repeats)
    return {"format": name, "ratio": raw_bytes / wire_bytes, "encode_bytes_per_second": raw_bytes / seconds["encode"],
            "decode_bytes_per_second": raw_bytes / seconds["decode"], "spread": max(spread.values())}


def _normal(n: int) -> jax.Array:
    return (0.02 * jax.random.normal(jax.random.key(0), (n,))).astype(jnp.bfloat16)


def _exponents(x: jax.Array) -> np.ndarray:
    return (np.asarray(codec.words(x)).ravel() >> 7 & 0xFF).astype(np.uint8)


def _bound(x: jax.Array) -> float:
    share = np.bincount(_exponents(x), minlength=256) / max(x.size, 1)
    share = share[share > 0]
    return float(16 / (8 - (share * np.log2(share)).sum()))


def _escape_share(x: jax.Array) -> float:
    counts = np.bincount(_exponents(x), minlength=256)
    return float(1 - np.convolve(counts, np.ones(7, int)).max() / max(x.size, 1))
