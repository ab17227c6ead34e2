"""Schedules by name. A new one is a new file and a line here."""

from . import fsmoe, mast, parm, pipemoe, sequential, sp_moe
from .base import Schedule

SCHEDULES: dict[str, Schedule] = {s.name: s for s in (
    sequential.SCHEDULE, pipemoe.SCHEDULE, parm.S1, parm.S2, fsmoe.SCHEDULE, mast.SCHEDULE, sp_moe.SCHEDULE)}
