"""Causal attention."""

from .plain import causal_attention as causal_attention
from .plain import rope as rope
