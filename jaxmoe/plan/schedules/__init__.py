"""Schedules by name: functions of a block and a cluster that give a plan. A new one is a new file and a line here."""

from collections.abc import Callable

from ..plan import Plan
from . import fsmoe, mast, parm, pipemoe, sequential, sp_moe

SCHEDULES: dict[str, Callable[..., Plan]] = {
    "sequential": sequential.plan,
    "pipemoe": pipemoe.plan,
    "parm-s1": parm.plan_s1,
    "parm-s2": parm.plan_s2,
    "fsmoe": fsmoe.plan,
    "mast": mast.plan,
    "sp-moe": sp_moe.plan,
}
