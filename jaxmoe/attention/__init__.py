"""Attention, its backends by name, and rotary positions."""

from .plain import BACKENDS as BACKENDS
from .plain import attend as attend
from .plain import rope as rope
