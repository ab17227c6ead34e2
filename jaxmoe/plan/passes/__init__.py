"""Changes to plans that any schedule's can go through: functions of a plan and a cluster that give a plan."""

from .sm import sm_aware as sm_aware
