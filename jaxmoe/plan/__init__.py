"""Plans: tasks of a stack of blocks, their order, and the readers that execute, simulate, search and prove it."""

from .plan import Plan as Plan
from .tasks import Degrees as Degrees
from .tasks import Pass as Pass
from .tasks import Span as Span
from .tasks import Task as Task
from .tasks import TaskGraph as TaskGraph
