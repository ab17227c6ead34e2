"""jaxmoe: Mixture-of-Experts transformers in JAX, trained across devices."""

from . import codec as codec
from . import collectives as collectives
from . import linen as linen
from .config import ConfigError as ConfigError
from .config import load_config as load_config
from .dispatch import Ragged as Ragged
from .dispatch import Slots as Slots
from .layer import MoE as MoE
from .mesh import Roles as Roles
from .mesh import make_mesh as make_mesh
from .models import DecoderLM as DecoderLM
from .plan.cluster import load_cluster as load_cluster
from .plan.plan import Plan as Plan
from .plan.simulate import simulate as simulate
from .planning import plan as plan
from .proof import prove as prove
from .roles import choose_roles as choose_roles
from .routing import Cosine as Cosine
from .routing import ExpertChoice as ExpertChoice
from .routing import NoisyTopK as NoisyTopK
from .routing import Soft as Soft
from .routing import TopK as TopK
from .types import Aux as Aux
