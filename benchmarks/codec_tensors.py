"""How well tensors of a trained quickstart model can be coded: ratio, escapes, pools and fallbacks, by tensor class.

    python benchmarks/codec_tensors.py runs/quickstart        # after `make train`

Needs `pip install zipnn zstandard` for the peers. The model runs one training batch in bfloat16, on one device: the
slots of its layers are what any number of devices exchange. Tensors of a class are put together (all have 2^18 values
or more). Prints one Markdown table; "raw" in it: the format's pools overflowed, and the bytes would go uncoded.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxmoe import DecoderLM, codec  # noqa: E402
from jaxmoe.cli.common import prepare_devices  # noqa: E402
from jaxmoe.config import ScheduleConfig  # noqa: E402
from jaxmoe.measure.codec import bench_codec  # noqa: E402
from jaxmoe.models.decoder import spec_of  # noqa: E402
from jaxmoe.plan.cluster import load_cluster  # noqa: E402
from jaxmoe.plan.schedules import SCHEDULES  # noqa: E402
from jaxmoe.plan.tasks import family  # noqa: E402
from jaxmoe.planned.attention import AttentionVerbs  # noqa: E402
from jaxmoe.planned.decoder import decoder_block, stack_parameters  # noqa: E402
from jaxmoe.planned.layer import moe_verbs  # noqa: E402
from jaxmoe.training.checkpoint import read_config  # noqa: E402
from jaxmoe.training.data import load_corpus, train_iterator  # noqa: E402
from jaxmoe.training.generate import trained_model  # noqa: E402

MESSAGES = {"slots": "dispatch", "back": "combine"}   # families of values that are exchanged


def restored(run_dir: str):
    """The trained model in bfloat16, on one device, its config, and a batch of its training data."""
    cfg = read_config(Path(run_dir))
    prepare_devices(cfg)
    model = trained_model(run_dir, cfg)
    train = cfg.train.model_copy(update={"precision": "bfloat16"})
    cfg = cfg.model_copy(update={"train": train, "schedule": ScheduleConfig(segment=cfg.model.layers)})
    alone = DecoderLM(cfg, None, rngs=nnx.Rngs(0))
    nnx.update(alone, jax.tree.map(jnp.asarray, jax.device_get(nnx.state(model))))
    batches = train_iterator(load_corpus(cfg).train, cfg.model.seq, cfg.train.batch, cfg.train.seed,
                             range(cfg.train.batch))
    return alone, cfg, jnp.asarray(next(batches)["tokens"])


def messages(model, cfg, tokens_BS) -> tuple[dict, dict, dict]:
    """What is exchanged, its cotangents, and the gradients of the layers' parameters."""
    layers = [stack_parameters(block) for block in model.as_layers()]
    spec, (B, S) = spec_of(cfg, None), (tokens_BS.shape[0], tokens_BS.shape[1] - 1)
    shapes = {name: v[...].shape for name, v in layers[0].items()}
    plan = SCHEDULES["sequential"](decoder_block(cfg, spec, shapes, {}, B), load_cluster("cpu-8"))
    attention = AttentionVerbs(plan.block, plan.degrees, cfg.model.rope_theta, cfg.model.norm_eps)
    verbs = moe_verbs(plan, spec, spec.groups(B, S), cfg.model.norm_eps) | attention.table()
    index_BS = jnp.arange(B * S).reshape(B, S)
    consts = {"mask": jnp.ones((B, S), bool), "index": index_BS, "segment": 0 * index_BS, "positions": index_BS % S}
    sent = [v for t in plan.graph.forward.tasks for v in t.writes if family(v) in MESSAGES]

    def run(params, added):
        env = params | {"x.0@0": model._embed(tokens_BS[:, :-1])}
        for task in (plan.graph.forward.by_name[name] for name in plan.forward):
            if task.verb != "param_gather":
                outs = verbs[task.verb].run(task, tuple(env[v] for v in task.reads), consts)
                env |= dict(zip(task.writes, outs, strict=True))
            env |= {v: env[v] + added[v].astype(env[v].dtype) for v in task.writes if v in added}
        logits_BSV = model._logits(env[f"x.0@{len(layers)}"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, tokens_BS[:, 1:]).mean()
        return loss, {v: env[v] for v in sent}

    params = {f"{name}@{i}": v[...] for i, layer in enumerate(layers) for name, v in layer.items()}
    shapes = jax.eval_shape(lambda: run(params, {})[1])
    zeros = {v: jnp.zeros(s.shape, s.dtype) for v, s in shapes.items()}
    (loss, values), grads = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(params, zeros)
    print(f"loss of the batch: {float(loss):.3f} nats per byte", file=sys.stderr)
    return values, grads[1], {"weights": params, "gradients": grads[0]}


def classes(model, cfg, tokens_BS) -> dict[str, jax.Array]:
    values, cotangents, layers = messages(model, cfg, tokens_BS)
    join = lambda arrays: jnp.concatenate([a.ravel() for a in arrays])  # noqa: E731
    found = {}
    for what, tree in (("", values), (" gradient", cotangents)):
        for fam, name in MESSAGES.items():
            found[f"{name}{what}"] = join(a for v, a in tree.items() if family(v) == fam)
    for what, tree in layers.items():
        found[f"expert {what}"] = join(a for v, a in tree.items() if "EDF" in v or "EFD" in v)
        found[f"all {what} of layers"] = join(tree.values())
    return found


def cells(rows: list[dict]) -> list[str]:
    """Ratio of each format, with the fullest pool, then the peers'."""
    by = {row["format"]: row for row in rows}
    mine = [f"{'raw' if by[f]['fell_back'] else format(by[f]['ratio'], '.3f')} ({by[f]['pool_used']:.0%})"
            for f in ("x4s", "x3p", "x3")]
    peers = [f"{by[f]['ratio']:.3f}" if f in by else "" for f in ("zipnn", "zstd")]
    return [f"{rows[0]['escape_share']:.2%}", *mine, f"{rows[0]['bound_ratio']:.3f}", *peers]


def main(run_dir: str) -> None:
    head = ("tensors", "values", "escapes", "x4s", "x3p", "x3", "bound", "zipnn", "zstd-1")
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    wide = {}
    for name, x in classes(*restored(run_dir)).items():
        wide |= {name: x} if x.dtype == jnp.float32 and "gradient" in name else {}
        rows = bench_codec({name: x.astype(jnp.bfloat16)}, repeats=1)
        print("| " + " | ".join([name, f"{x.size:,}", *cells(rows)]) + " |", flush=True)
    print("\n| float32, as it is reduced | x4s | x3p | x3p:as-bf16 |\n" + "| --- " * 4 + "|")
    for name, x in wide.items():
        packets = [codec.encode(x, fmt) for fmt in ("x4s", "x3p", "x3p:as-bf16")]
        print(f"| {name} | " + " | ".join("raw" if p.fell_back else f"{p.raw_bytes / p.wire_bytes:.3f}"
                                           for p in packets) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
