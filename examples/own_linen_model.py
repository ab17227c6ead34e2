"""The MoE layer in a Flax Linen model of one's own, parameters created where the mesh wants them.

    python examples/own_linen_model.py        # on a CPU: JAX_NUM_CPU_DEVICES=8 python examples/own_linen_model.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe

WIDTH, CLASSES, STEPS = 32, 4, 20


class Classifier(nn.Module):
    """Embed, mix with an MoE layer, average over the sequence, classify."""

    mesh: Any
    roles: jaxmoe.Roles

    @nn.compact
    def __call__(self, tokens_BS):
        x_BSD = nn.Embed(64, WIDTH)(tokens_BS)
        moe = jaxmoe.linen.MoE(WIDTH, 64, num_experts=8, router=jaxmoe.TopK(k=2), mesh=self.mesh, roles=self.roles)
        y_BSD, aux = moe(x_BSD)
        return nn.Dense(CLASSES)((x_BSD + y_BSD).mean(1)), aux


def create_sharded(model, mesh, tokens_BS):
    """Parameters, each made on the devices that keep it."""
    def init(key):
        return model.init(key, tokens_BS)

    shardings = nn.get_sharding(jax.eval_shape(init, jax.random.key(0)), mesh)
    return nn.unbox(jax.jit(init, out_shardings=shardings)(jax.random.key(0)))


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))
    model = Classifier(mesh, jaxmoe.Roles(data=("device",), expert=("device",)))
    tokens_BS = jax.device_put(jax.random.randint(jax.random.key(1), (32, 16), 0, 64), NamedSharding(mesh, P("device")))
    labels_B = jnp.sum(tokens_BS, 1) % CLASSES
    variables = create_sharded(model, mesh, tokens_BS)
    tx = optax.adam(1e-2)
    opt_state = tx.init(variables)

    @jax.jit
    def train_step(variables, opt_state):
        def loss_fn(variables):
            logits_BC, aux = model.apply(variables, tokens_BS)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits_BC, labels_B).mean()
            return loss + 0.01 * aux.losses["load_balance"], (loss, aux.dropped_fraction)

        grads, metrics = jax.grad(loss_fn, has_aux=True)(variables)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables, updates), opt_state, metrics

    for step in range(STEPS):
        variables, opt_state, (loss, dropped) = train_step(variables, opt_state)
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}  dropped {float(dropped):.3f}")


if __name__ == "__main__":
    main()
