"""The MoE layer in a Flax NNX model of one's own: a small classifier of sequences, experts split over all devices.

    python examples/own_nnx_model.py          # on a CPU: JAX_NUM_CPU_DEVICES=8 python examples/own_nnx_model.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmoe

WIDTH, CLASSES, STEPS = 32, 4, 20


class Classifier(nnx.Module):
    """Embed, mix with an MoE layer, average over the sequence, classify."""

    def __init__(self, mesh, roles, rngs: nnx.Rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.moe = jaxmoe.MoE(WIDTH, 64, num_experts=8, router=jaxmoe.TopK(k=2), mesh=mesh, roles=roles, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, tokens_BS):
        x_BSD = self.embed(tokens_BS)
        y_BSD, aux = self.moe(x_BSD)
        return self.head((x_BSD + y_BSD).mean(1)), aux


@nnx.jit
def train_step(model, optimizer, tokens_BS, labels_B):
    def loss_fn(model):
        logits_BC, aux = model(tokens_BS)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits_BC, labels_B).mean()
        return loss + 0.01 * aux.losses["load_balance"], (loss, aux)

    (_, (loss, aux)), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, aux.dropped_fraction


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))
    roles = jaxmoe.Roles(data=("device",), expert=("device",))
    model = Classifier(mesh, roles, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    tokens_BS = jax.device_put(jax.random.randint(jax.random.key(1), (32, 16), 0, 64), NamedSharding(mesh, P("device")))
    labels_B = jnp.sum(tokens_BS, 1) % CLASSES
    for step in range(STEPS):
        loss, dropped = train_step(model, optimizer, tokens_BS, labels_B)
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}  dropped {float(dropped):.3f}")


if __name__ == "__main__":
    main()
