"""Routers, one a file, and the losses on what they decide."""

from .base import Weight as Weight
from .base import updated_bias as updated_bias
from .cosine import Cosine as Cosine
from .expert_choice import ExpertChoice as ExpertChoice
from .noisy_topk import NoisyTopK as NoisyTopK
from .soft import Soft as Soft
from .topk import TopK as TopK

Router = TopK | NoisyTopK | Cosine | ExpertChoice | Soft


def bias_update_rate(router: Router) -> float:
    """The rate of a router's balancing bias; 0 if it has none."""
    return router.bias_update_rate if isinstance(router, TopK) else 0.0


ROUTERS: dict[str, type[Router]] = {
    "topk": TopK,
    "noisy_topk": NoisyTopK,
    "cosine": Cosine,
    "expert_choice": ExpertChoice,
    "soft": Soft,
}
