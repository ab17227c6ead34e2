"""Memory of one device in a train step, on 1, 2, 4 and 8 simulated devices: arguments and temporaries, as compiled.

    python benchmarks/memory.py [CONFIG] [--section.key=value ...]

Parameters and optimizer state are arguments; those that `expert` and `fsdp` split fall as 1/devices. The global batch
is the same throughout, so activations fall, too.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxmoe.cli.common import overrides
from jaxmoe.config import load_config
from jaxmoe.proof import lowered_step


def main(path: str, *options: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{'devices':>7} {'arguments MiB':>14} {'temporaries MiB':>16}")
    for count in (1, 2, 4, 8):
        cfg = load_config(path, [f"mesh.axes={{ device = {count} }}", *overrides(list(options))])
        mesh = Mesh(np.array(jax.devices()[:count]), ("device",), axis_types=(AxisType.Auto,))
        found = lowered_step(cfg, mesh, None).compile().memory_analysis()
        print(f"{count:7d} {found.argument_size_in_bytes / 2**20:14.2f} {found.temp_size_in_bytes / 2**20:16.2f}")


if __name__ == "__main__":
    default = str(Path(__file__).parent.parent / "configs" / "quickstart.toml")
    given = sys.argv[1:]
    main(*(given if given and not given[0].startswith("--") else [default, *given]))
