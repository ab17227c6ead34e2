"""The grouped product equals its reference, whatever unused rows hold, and does not cost more with more groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxmoe.kernels.grouped_matmul import grouped_matmul, reference

pytestmark = pytest.mark.core
R, D, F, E = 900, 24, 40, 6   # a tile of 512 rows, of 256, and smaller ones
SIZES = {
    "uneven": [100, 1, 300, 33, 260, 6], "full": [512, 256, 128, 0, 0, 4], "empty groups": [0, 300, 0, 0, 250, 0],
    "one takes all": [0, 0, R, 0, 0, 0], "unused rows": [31, 0, 290, 5, 0, 64], "no rows": [0] * E,
}


def operands(dtype=jnp.float32, rows=R, groups=E):
    shapes = {"x": (rows, D), "w": (groups, D, F), "g": (rows, F)}
    return [jnp.asarray(np.random.default_rng(i).normal(size=s), dtype) for i, s in enumerate(shapes.values())]


def run(product, x, w, g, sizes):
    """The product, and what it makes of the cotangent g."""
    y, pullback = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return (y, *pullback(g.astype(y.dtype)))


ours, wanted = jax.jit(lambda *a: run(grouped_matmul, *a)), jax.jit(lambda *a: run(reference, *a))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_the_reference(sizes):
    x, w, g = operands()
    sizes = jnp.asarray(sizes, jnp.int32)
    for got, want in zip(ours(x, w, g, sizes), wanted(x, w, g, sizes), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()) + 1e-30)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_bfloat16_is_as_near_to_float32_as_the_reference(sizes):
    """Both round operands alike; each product is rounded once, the weights' gradient after a sum in float32."""
    x, w, g = operands(jnp.bfloat16)
    sizes = jnp.asarray(sizes, jnp.int32)
    exact = wanted(*(a.astype(jnp.float32) for a in (x, w, g)), sizes)
    for got, want in zip(ours(x, w, g, sizes), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=2**-8 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_case_05_unused_rows_never_matter(value):
    """Neither what operand rows hold there, nor what their cotangents hold."""
    x, w, g = operands()
    sizes = jnp.asarray(SIZES["unused rows"], jnp.int32)
    unused_R1 = (jnp.arange(R) >= sizes.sum())[:, None]
    clean = ours(jnp.where(unused_R1, 0, x), w, jnp.where(unused_R1, 0, g), sizes)
    broken = ours(jnp.where(unused_R1, value, x), w, jnp.where(unused_R1, value, g), sizes)
    for got, want in zip(broken, clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.asarray(broken[0])[sizes.sum():].any() and not np.asarray(broken[1])[sizes.sum():].any()


def costs(product, groups):
    """FLOPs and bytes of temporary memory of the product and its gradients, as compiled for so many groups."""
    sizes = jnp.full(groups, 2048 // groups, jnp.int32)
    args = operands(rows=2048, groups=groups)
    compiled = jax.jit(lambda *a: run(product, *a)).lower(*args, sizes).compile()
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes


def test_case_32_cost_does_not_grow_with_the_number_of_groups():
    """The compiled loops are the same for 8 and 64 groups, where the reference pays for every group and row.

    Memory may grow by two copies of the weights that are more (transposed, and their gradient), not with the rows.
    """
    (flops, temporary), (more_flops, more_temporary) = costs(grouped_matmul, 8), costs(grouped_matmul, 64)
    more_weights = (64 - 8) * D * F * 4
    assert more_flops < 1.2 * flops and more_temporary - temporary <= 2 * more_weights
    (dense, room), (more_dense, more_room) = costs(reference, 8), costs(reference, 64)
    assert more_dense > 4 * dense and more_room - room > 20 * more_weights


def test_shapes_must_agree():
    x, w, _ = operands()
    with pytest.raises(ValueError, match=r"must agree, got \(900, 24\), \(6, 24, 40\) and \(5,\)"):
        grouped_matmul(x, w, jnp.zeros(5, jnp.int32))
