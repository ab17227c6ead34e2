"""An All-to-All in steps with its gather one behind, against the two collectives after each other; 8 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxmoe.collectives import all_gather, all_to_all, all_to_all_gather
from jaxmoe.collectives.stepwise import step

pytestmark = pytest.mark.core
MESH = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
P = jax.sharding.PartitionSpec(("a", "b", "c"))
GROUPS = {   # axes of the All-to-All, axes of the gather
    "1 and 1": ((), ()), "1 and 2": ((), ("c",)), "2 and 1": (("a",), ()), "2 and 2": (("a",), ("c",)),
    "2 and 4": (("a",), ("b", "c")), "4 and 2": (("a", "b"), ("c",)), "4 and 2, one shared": (("a", "c"), ("c",)),
    "4 and 4, shared and turned": (("b", "a"), ("c", "b")), "2 and 2, the same": (("c",), ("c",)),
}


def on_devices(call):
    return jax.jit(jax.shard_map(call, mesh=MESH, in_specs=P, out_specs=P, check_vma=True))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("axes", "gather"), GROUPS.values(), ids=GROUPS)
def test_steps_equal_both_collectives_bit_for_bit(axes, gather, dim):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8 * 8, 3, 5)), jnp.float32)

    def run(call, values):
        """Results and gradients of all devices. Whole numbers add up to the same in any order."""
        def body(x):
            y, pull = jax.vjp(call, x)
            return y.ravel(), pull(9 + jnp.round(8 * jnp.cos(y + jnp.arange(y.size).reshape(y.shape))))[0]

        return [np.asarray(a) for a in on_devices(body)(values)]

    found = run(lambda x: all_to_all_gather(x, axes, gather, dim), x)
    wanted = run(lambda x: all_gather(all_to_all(x, axes), gather, dim), x)
    for a, b in zip(found, wanted, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("mates", [(), ("c",)], ids=["alone", "mates"])
def test_a_step_and_its_transpose(mates, shift):
    """Every part carries its sender and its receiver; the step back returns it."""
    axes, q = ("a", "b"), 2 if mates else 1

    def body(x):
        e, g = jax.lax.axis_index(axes), jax.lax.axis_index(mates) if mates else 0
        to = jnp.arange(q) + q * ((e + shift) % 4)
        sent = jnp.stack([jnp.full(q, e * q + g), to], 1)
        came = step(sent, axes, mates, shift)
        frm = jnp.arange(q) + q * ((e - shift) % 4)
        right = (came == jnp.stack([frm, jnp.full(q, e * q + g)], 1)).all()
        return (x * (right & (step(came, axes, mates, -shift) == sent).all()))

    assert on_devices(body)(jnp.ones(8)).all()


def test_parts_that_do_not_divide():
    with pytest.raises(ValueError, match=r"the 2 devices of \('a',\) must divide dim 0, got shape \(3, 2\)"):
        on_devices(lambda x: all_to_all_gather(x, ("a",), ("c",)))(jnp.ones((24, 2)))
