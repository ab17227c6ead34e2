"""Layouts in which tokens reach their experts."""

from .ragged import Ragged as Ragged
from .slots import Slots as Slots
