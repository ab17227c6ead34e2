"""Lossless coding of floating-point tensors for slow links: the same bits come out, NaN payloads included.

Formats: "x4s" (1.30, fastest), "x3p" (1.36), "x3" (1.39), "raw" (the identity). float32 sends its low halves as they
are (1.13 to 1.16), or, with the suffix ":as-bf16", only those that are not zero (2.4 to 2.5 for float32 that came from
bfloat16).

    packet = jaxmoe.codec.encode(x, "x4s")
    jaxmoe.codec.decode(packet)  # x, bit for bit
"""

from ..kernels.exponent_codec import BLOCK as BLOCK  # pyright: ignore[reportMissingImports]
from ..kernels.exponent_codec import Flags as Flags  # pyright: ignore[reportMissingImports]
from ..kernels.exponent_codec import resolve as resolve  # pyright: ignore[reportMissingImports]
from ..kernels.exponent_codec import sum_in_order as sum_in_order  # pyright: ignore[reportMissingImports]
from .packet import Packet as Packet
from .packet import decode as decode
from .packet import encode as encode
from .verbs import decode_from as decode_from
from .verbs import encode_for as encode_for
from .verbs import from_words as from_words
from .verbs import overflowed as overflowed
from .verbs import sum_from as sum_from
from .verbs import wire_bytes as wire_bytes
from .verbs import words as words
