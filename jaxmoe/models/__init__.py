"""Models built from the layers."""

from .decoder import DecoderLM as DecoderLM
