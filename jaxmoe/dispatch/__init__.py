"""Layouts in which tokens reach their experts."""

from .slots import Slots as Slots
from .ragged import Ragged as Ragged
