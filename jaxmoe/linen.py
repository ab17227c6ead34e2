"""The layer for Linen models: the same functional core, parameters with Linen's partitioning metadata."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from .dispatch import Ragged, Slots
from .experts import ExpertWeights
from .layer import Spec, apply
from .mesh import Roles
from .routing import TopK
from .types import Aux


class MoE(nn.Module):
    """`jaxmoe.MoE` for Linen: y_BSD, aux = moe.apply(variables, x_BSD). See there for the fields.

    Parameters are boxed with `nn.Partitioned`: `nn.get_sharding` gives the shardings to create them with.

    Example: ``moe = jaxmoe.linen.MoE(64, 128, 8); variables = moe.init(jax.random.key(0), jnp.ones((2, 16, 64)))``
    """

    d_model: int
    d_ff: int
    num_experts: int
    router: TopK = TopK()
    dispatch: Slots | Ragged = Slots()
    activation: str = "swiglu"
    mesh: Mesh | None = None
    roles: Roles | None = None
    group: Literal["sequence"] | int = "sequence"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BSD, token_mask=None, forced_experts=None) -> tuple[jax.Array, Aux]:
        roles = self.roles if self.mesh is not None and self.roles is not None else Roles()
        spec = Spec(self.num_experts, self.router, self.dispatch, self.activation, roles, self.group,
                    jnp.dtype(self.dtype))

        def weight(name: str, shape: tuple[int, ...], fan_in: int, *axes: tuple[str, ...]) -> Any:
            init = nn.initializers.normal(fan_in**-0.5)
            names: Any = tuple(a or None for a in axes)
            return self.param(name, nn.with_partitioning(init, names, self.mesh) if self.mesh else init, shape)

        E, D, F = self.num_experts, self.d_model, self.d_ff
        columns, rows = ((roles.expert, roles.expert_fsdp, roles.expert_shard),
                         (roles.expert, roles.expert_shard, roles.expert_fsdp))
        router_DE = weight("w_router_DE", (D, E), D, roles.fsdp, ())
        up_EDF, down_EFD = weight("w_up_EDF", (E, D, F), D, *columns), weight("w_down_EFD", (E, F, D), F, *rows)
        gate_EDF = weight("w_gate_EDF", (E, D, F), D, *columns) if self.activation == "swiglu" else None
        return apply(spec, self.mesh, router_DE, ExpertWeights(up_EDF, down_EFD, gate_EDF), x_BSD, token_mask,
                     forced_experts)
