"""The codec's rates on one core, beside zipnn's and zstd's on the same arrays in the same run.

    python benchmarks/codec_cpu.py

Needs `pip install zipnn zstandard` for the peers. Prints one table; rates are GB/s of raw bytes, medians of 9.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxmoe.measure.codec import bench_codec  # noqa: E402


def main() -> None:
    key = jax.random.key(0)
    normal = jax.random.normal(key, (4096, 512))
    scale = jnp.exp(1.5 * jax.random.normal(jax.random.key(1), (4096, 1)))
    student = jax.random.t(key, 3.0, (4096, 512))
    arrays = {"normal": normal * 0.02, "a scale per row": normal * scale, "student t(3)": student}
    rows = bench_codec({name: x.astype(jnp.bfloat16) for name, x in arrays.items()}, repeats=9)
    print("| array | format | ratio | bound | encode GB/s | decode GB/s | pool used |\n" + "| --- " * 7 + "|")
    for row in rows:
        used = f"{row['pool_used']:.0%}" if "pool_used" in row else ""
        print(f"| {row['array']} | {row['format']} | {row['ratio']:.3f} | {row['bound_ratio']:.3f} "
              f"| {row['encode_bytes_per_second'] / 1e9:.2f} | {row['decode_bytes_per_second'] / 1e9:.2f} | {used} |")


if __name__ == "__main__":
    main()
