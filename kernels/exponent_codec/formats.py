"""Formats of the exponent codec and the bytes of a payload: one table, read by every backend.

A 16-bit word is split into `rest` (sign, then mantissa: one byte, sent as it is) and the 8-bit exponent field, which is
coded relative to a base. All arithmetic on exponents is modulo 256, so no value needs a special case.

Shapes: P parts (one a destination), N words of a part, T tiles of a part, R = 16 rows and W = 256 columns of a tile,
S = T * W sub-blocks. A part is padded to whole tiles with its own first words. Row r of a tile is one *block*, 256
consecutive words, and has one base. Column w is one *sub-block*: 16 words, each of another block; what does not fit the
dense code is sent a sub-block at a time. Reading a tile by rows, everything dense is elementwise: no shuffles.

Base of a block: top = sum(e) // count + 3 over exponent fields e in 1..254, 0 if there are none.
Code of a word: (top - e) % 16 if -2 <= top - e <= 12 (modulo 256), else 13, and if e is not 0 the sub-block is `raw`.

Wire format, version 1, all sections of a part in this order, every integer little-endian:

| section | bytes | holds |
| --- | --- | --- |
| rest | 4096 T | rest of word [t, r, w] at byte (t * 16 + r) * 256 + w |
| codes, x4s | 2048 T | byte (t * 8 + r) * 256 + w = code of [t, r, w] + 16 * code of [t, r + 8, w] |
| codes, x3p and x3 | 1536 T | plane b = 0..2: bit k of byte ((3 t + b) * 2 + h) * 256 + w = bit b of [t, 8 h + k, w] |
| tops | 16 T | base of block [t, r] |
| bitmap of raw, x4s and x3p | 32 T | bit i % 8 of byte i // 8 = sub-block i = t * 256 + w is raw |
| pool of raw, x4s and x3p | 16 a row | exponent fields, row 0 to 15, of each raw sub-block in order |
| bitmap of plane 3, x3p | 32 T | sub-block is not raw and has a code > 7 |
| pool of plane 3, x3p | 2 a row | bits 3 of its 16 codes, row 0 in bit 0 |
| pool of escapes, x3 | 1 a row | exponent fields of the words with code 7, in order (t, h, w, k) of the planes' bits |
| low | 8192 T | float32 only: low halves, uint16, in the order of `rest`; with as-bf16 a bitmap and a pool instead |
| bitmap, pool of low, as-bf16 | 32 T, 32 a row | sub-block has a low half that is not 0; its 16 low halves, uint16 |
| trailer | 8 or more | version, format, overflow (0 or 1), zeros up to a multiple of 256 bytes of the part |

x3 has other codes: top - e if 0 <= top - e <= 6, else 7, an escape. Rows of a pool that are not used are zero.
Overflow: more rows were needed than the pool has; the part cannot be decoded.
`raw` is the identity: words as they are, no trailer.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

Bytes = TypeVar("Bytes")
VERSION = 1
ROWS, COLUMNS = 16, 256
TILE = ROWS * COLUMNS
BLOCK = COLUMNS  # consecutive words that share a base
ANCHOR = 3  # from the floor of the mean exponent to the top of a Gaussian's likeliest seven and eight
ABOVE, BELOW, ZERO = 2, 12, 13  # a 4-bit code reaches from top + 2 down to top - 12
NARROW, ESCAPE = 7, 7  # x3: codes 0..6 are a window, 7 an escape
TRAILER = 8  # bytes at least


@dataclass(frozen=True)
class Pool:
    """Rows of `row_bytes` for those of many candidates that need one.

    share: rows / candidates for long messages. chance: that a candidate of N(0, sigma) at the worst sigma needs one.
    """

    row_bytes: int
    share: float
    chance: float

    def rows(self, candidates: int) -> int:
        """Rows of a message: the share, or what a Gaussian one exceeds with probability < 1e-9, if that is more."""
        mean = self.chance * candidates
        return min(candidates, max(math.ceil(self.share * candidates), math.ceil(mean + 6 * math.sqrt(mean)) + 6))


@dataclass(frozen=True)
class Format:
    """What is sent of a word. low: low halves of float32, "none" (16-bit words), "all" or "pool" (as-bf16)."""

    name: str
    number: int
    dense_bits: int = 0
    raw: Pool | None = None
    plane: Pool | None = None
    escapes: Pool | None = None
    low: str = "none"

    @property
    def is_identity(self) -> bool:
        return self.dense_bits == 0

    @property
    def word_bytes(self) -> int:
        return 2 if self.low == "none" else 4


LOW_POOL = Pool(2 * ROWS, 1 / 16, 0)
FORMATS = {
    f.name: f
    for f in (
        Format("raw", 0),
        Format("x4s", 1, 4, raw=Pool(ROWS, 1 / 32, 0.0085)),
        Format("x3p", 2, 3, raw=Pool(ROWS, 1 / 56, 0.0085), plane=Pool(2, 0.45, 0.24)),
        Format("x3", 3, 3, escapes=Pool(1, 1 / 17, 0.034)),
    )
}
AS_BF16 = ":as-bf16"


def resolve(codec: str, dtype) -> Format:
    """Format of a codec's name for a dtype. float32 sends its low halves; with the suffix ":as-bf16", those not 0."""
    name, checked = codec.removesuffix(AS_BF16), codec.endswith(AS_BF16)
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, 1, 0)
        raise ValueError(f'codec must be one of {", ".join(FORMATS)}, got "{codec}". Did you mean "{near[0]}"?')
    if str(dtype) == "float32":
        return replace(FORMATS[name], low="pool" if checked and name != "raw" else "all")
    if str(dtype) != "bfloat16":
        raise ValueError(f'codec "{codec}" needs bfloat16 or float32, got {dtype}. Send it with codec=None; '
                         "float16 has too few exponent bits to gain: the bound is 1.18.")
    if checked:
        raise ValueError(f'codec "{codec}" is for float32, got bfloat16. Use codec="{name}".')
    return FORMATS[name]


def num_tiles(n: int) -> int:
    return -(-n // TILE)


@cache
def sections(fmt: Format, n: int) -> dict[str, int]:
    """Bytes of each section of a part of n words, in the order of the wire."""
    if n >= 2**31:
        raise ValueError(f"a part may have at most 2**31 - 1 words, got {n}. Split the message.")
    if fmt.is_identity:
        return {"words": n * fmt.word_bytes}
    tiles = num_tiles(n)
    columns, bitmap = tiles * COLUMNS, tiles * COLUMNS // 8
    sizes = {"rest": tiles * TILE, "codes": tiles * TILE * fmt.dense_bits // 8, "tops": tiles * ROWS}
    if fmt.raw:
        sizes |= {"raw_map": bitmap, "raw": fmt.raw.rows(columns) * fmt.raw.row_bytes}
    if fmt.plane:
        sizes |= {"plane_map": bitmap, "plane": fmt.plane.rows(columns) * fmt.plane.row_bytes}
    if fmt.escapes:
        sizes |= {"escapes": fmt.escapes.rows(tiles * TILE)}
    if fmt.low == "all":
        sizes |= {"low": 2 * tiles * TILE}
    if fmt.low == "pool":
        sizes |= {"low_map": bitmap, "low": LOW_POOL.rows(columns) * LOW_POOL.row_bytes}
    return sizes | {"trailer": TRAILER + -(sum(sizes.values()) + TRAILER) % COLUMNS}


def part_bytes(fmt: Format, n: int) -> int:
    """Bytes of a part of n words."""
    return sum(sections(fmt, n).values())


def split(payload: Bytes, fmt: Format, n: int, cut: Callable[[Bytes, int, int], Bytes]) -> dict[str, Bytes]:
    """Sections by name; cut(payload, start, stop) takes bytes of it."""
    found, start = {}, 0
    for name, size in sections(fmt, n).items():
        found[name] = cut(payload, start, start + size)
        start += size
    return found
