"""Feed-forward experts."""

from .dense import ACTIVATIONS as ACTIVATIONS
from .dense import ExpertWeights as ExpertWeights
from .dense import experts as experts
from .grouped import grouped_experts as grouped_experts
