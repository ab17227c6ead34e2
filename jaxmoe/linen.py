"""The layer for Linen models: the same functional core, parameters with Linen's partitioning metadata."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from .dispatch import Dispatch, Slots
from .experts import ExpertWeights
from .layer import apply, shared_experts
from .mesh import Roles
from .routing import Router, TopK, bias_update_rate, updated_bias
from .spec import Group, Spec
from .types import Aux


class MoE(nn.Module):
    """`jaxmoe.MoE` for Linen: y_BSD, aux = moe.apply(variables, x_BSD). See there for fields and arguments.

    Parameters are boxed with `nn.Partitioned`: `nn.get_sharding` gives the shardings to create them with. A balancing
    bias is in the collection "router_bias"; `update_bias` gives its next value.

    Example: ``moe = jaxmoe.linen.MoE(64, 128, 8); variables = moe.init(jax.random.key(0), jnp.ones((2, 16, 64)))``
    """

    d_model: int
    d_ff: int
    num_experts: int
    router: Router = TopK()
    dispatch: Dispatch = Slots()
    activation: str = "swiglu"
    shared_experts: int = 0
    mesh: Mesh | None = None
    roles: Roles | None = None
    group: Group = "sequence"
    load_balance: str = "switch"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x_BSD, token_mask=None, segment_ids=None, forced_experts=None, key=None
    ) -> tuple[jax.Array, Aux]:
        """As `jaxmoe.MoE.__call__`."""
        roles = self.roles if self.mesh is not None and self.roles is not None else Roles()
        spec = Spec(self.d_model, self.d_ff, self.num_experts, self.router, self.dispatch, self.activation, self.mesh,
                    roles, self.group, self.load_balance, jnp.dtype(self.dtype))
        router = {name: self._weight(f"router_{name}", w.shape, w.scale, mean=w.mean)
                  for name, w in self.router.weights(self.d_model, self.num_experts).items()}
        bias_E = None
        if bias_update_rate(self.router):
            bias_E = self.variable("router_bias", "bias", jnp.zeros, (self.num_experts,)).value
        weights = self._experts("", self.num_experts, spec.expert_specs)
        y_BSD, aux = apply(spec, router, weights, x_BSD, token_mask, segment_ids, forced_experts, bias_E, key)
        if self.shared_experts:
            y_BSD = y_BSD + self._shared(x_BSD, token_mask, spec)
        return y_BSD, aux

    def _shared(self, x_BSD, token_mask, spec: Spec):
        columns: Any = (None, spec.roles.fsdp)
        rows: Any = (None, None, spec.roles.fsdp)
        specs = ExpertWeights(columns, rows, columns if spec.activation == "swiglu" else None)
        w = self._experts("shared_", self.shared_experts, specs)
        return shared_experts(x_BSD, token_mask, w, spec)

    def _experts(self, prefix: str, count: int, specs: Any) -> ExpertWeights:
        D, F = self.d_model, self.d_ff
        up = self._weight(f"{prefix}w_up_EDF", (count, D, F), D**-0.5, specs.up_EDF)
        down = self._weight(f"{prefix}w_down_EFD", (count, F, D), F**-0.5, specs.down_EFD)
        if specs.gate_EDF is None:
            return ExpertWeights(up, down)
        return ExpertWeights(up, down, self._weight(f"{prefix}w_gate_EDF", (count, D, F), D**-0.5, specs.gate_EDF))

    def _weight(self, name: str, shape: tuple[int, ...], scale: float, spec: Any = (), mean: float = 0.0) -> Any:
        init: Any = lambda key, shape: mean + scale * jax.random.normal(key, shape)  # noqa: E731
        if self.mesh is not None:
            axes: Any = (*(a or None for a in spec), *(None,) * (len(shape) - len(spec)))
            init = nn.with_partitioning(init, axes, self.mesh)
        return self.param(name, init, shape)

    def update_bias(self, router_bias: dict[str, jax.Array], tokens_per_expert: jax.Array) -> dict[str, jax.Array]:
        """The collection "router_bias" after an optimizer step. tokens_per_expert: (E,), of the step's global batch."""
        rate = bias_update_rate(self.router)
        return {name: updated_bias(bias_E, tokens_per_expert, rate) for name, bias_E in router_bias.items()}
