"""Feed-forward experts."""

from .dense import ACTIVATIONS as ACTIVATIONS
from .dense import ExpertWeights as ExpertWeights
from .dense import experts as experts
from .dense import experts_down as experts_down
from .dense import experts_up as experts_up
from .dense import experts_up_gradient as experts_up_gradient
from .grouped import grouped_down as grouped_down
from .grouped import grouped_experts as grouped_experts
from .grouped import grouped_up as grouped_up
