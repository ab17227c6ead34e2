"""Print the README's support matrix: what each router goes together with, found by tracing the layer.

    python benchmarks/support_matrix.py --write        # renews the block in README.md
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmoe import MoE, linen
from jaxmoe.dispatch import DISPATCHES
from jaxmoe.routing import ROUTERS

BEGIN, END = "<!-- support matrix: benchmarks/support_matrix.py --write -->\n", "<!-- end -->\n"
README = Path(__file__).parent.parent / "README.md"


def nnx_face(x_BSD, forced_BSK, **fields):
    return MoE(8, 8, 4, rngs=nnx.Rngs(0), **fields)(x_BSD, forced_experts=forced_BSK)


def linen_face(x_BSD, forced_BSK, **fields):
    return linen.MoE(8, 8, 4, **fields).init_with_output(jax.random.key(0), x_BSD, forced_experts=forced_BSK)


FACES = {"nnx": nnx_face, "Linen": linen_face}


def works(face, forced: bool = False, **fields) -> bool:
    """Whether such a layer can be traced."""
    x_BSD = jnp.ones((1, 4, 8))
    forced_BSK = jnp.zeros((1, 4, getattr(fields["router"], "k", 1)), jnp.int32) if forced else None
    try:
        jax.eval_shape(lambda x: FACES[face](x, forced_BSK, **fields), x_BSD)
    except ValueError:
        return False
    return True


def support_matrix() -> str:
    """A row for each router; a cell names the faces that it works with."""
    lines = ["| `moe.router.kind` | " + " | ".join(f"`{name}`" for name in DISPATCHES) +
             " | `forced_experts` | causal models |", "| --- |" + " --- |" * (len(DISPATCHES) + 2)]
    for name, router in ROUTERS.items():
        faces = lambda **fields: ", ".join(f for f in FACES if works(f, **fields)) or "refused"  # noqa: E731
        cells = [faces(router=router(), dispatch=dispatch()) for dispatch in DISPATCHES.values()]  # noqa: B023
        cells += [faces(router=router(), forced=True), "leaks the future" if "leaks" in router.__doc__ else "yes"]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def replaced(readme: str) -> str:
    """The README with the present matrix."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + support_matrix() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(replaced(README.read_text()))
    print(support_matrix(), end="")
