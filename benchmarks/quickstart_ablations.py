"""Does a trained model use its experts and its attention? Its held-out loss, whole and with either taken away.

    python benchmarks/quickstart_ablations.py runs/quickstart        # after `make train`

Experts: every expert becomes the mean of its layer's experts. Attention: each token sees itself only. Losses are in
nats per token, on the windows that training evaluates on, beside those of bigram and trigram counts.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmoe import MoE
from jaxmoe.cli.common import prepare_devices
from jaxmoe.training.checkpoint import read_config
from jaxmoe.training.data import heldout_batches, load_corpus, ngram_nats
from jaxmoe.training.generate import trained_model


@nnx.jit(static_argnames="alone")
def loss_of(model, tokens_BS, alone: bool) -> jax.Array:
    """Mean cross-entropy. alone: every token is a document of its own, so that attention sees nothing else."""
    inputs_BS = tokens_BS[:, :-1]
    segments_BS = jnp.broadcast_to(jnp.arange(inputs_BS.shape[1]), inputs_BS.shape) if alone else None
    logits_BSV, _ = model(inputs_BS, segment_ids=segments_BS)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV.astype(jnp.float32), tokens_BS[:, 1:]).mean()


def with_mean_experts(model):
    """The model with each expert replaced by the mean over its layer's experts."""
    model = nnx.clone(model)
    for _, moe in nnx.iter_graph(model):
        if isinstance(moe, MoE):
            for param in (moe.w_up_EDF, moe.w_down_EFD, moe.w_gate_EDF):
                if param is not None:
                    w = param[...]   # [..., E, D, F], with a dim for layers in front where they are scanned
                    param[...] = jax.device_put(jnp.broadcast_to(w.mean(-3, keepdims=True), w.shape), w.sharding)
    return model


def ablations(model, windows: list[np.ndarray]) -> dict[str, float]:
    """Held-out loss by name of what was taken away."""
    mean = lambda model, alone: float(np.mean([loss_of(model, tokens, alone) for tokens in windows]))  # noqa: E731
    return {"nothing": mean(model, False), "experts": mean(with_mean_experts(model), False),
            "attention": mean(model, True)}


def main(run_dir: str) -> None:
    cfg = read_config(Path(run_dir))
    prepare_devices(cfg)
    model = trained_model(run_dir, cfg)
    corpus = load_corpus(cfg)
    windows = heldout_batches(corpus.heldout, cfg.model.seq, cfg.train.batch, cfg.train.eval_batches)
    found = ablations(model, windows)
    for name, loss in found.items():
        print(f"without {name:10s} {loss:.4f}  {loss - found['nothing']:+.4f}")
    for name, order in (("bigram", 2), ("trigram", 3)):
        print(f"{name:18s} {ngram_nats(corpus.train, np.concatenate(windows), order, cfg.model.vocab):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
