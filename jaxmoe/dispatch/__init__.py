"""Layouts in which tokens reach their experts."""

from .ragged import Ragged as Ragged
from .slots import Slots as Slots

Dispatch = Slots | Ragged
DISPATCHES: dict[str, type[Dispatch]] = {"slots": Slots, "ragged": Ragged}
