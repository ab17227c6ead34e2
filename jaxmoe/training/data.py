"""Token corpora, the resumable grain pipeline, fixed held-out windows and n-gram baselines."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grain
import jax
import numpy as np

SEPARATOR_BYTE = 0
BYTE_VOCAB = 256
HELD_OUT_ONE_IN = 10
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)


class Codec(Protocol):
    """Text to token ids and back."""

    vocab: int

    def encode(self, text: bytes) -> np.ndarray: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteCodec:
    """One token per byte."""

    vocab = BYTE_VOCAB

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(t) % BYTE_VOCAB for t in tokens).decode("utf-8", errors="replace")


class HuggingFaceCodec:
    """A Hugging Face `tokenizer.json` file read with the `tokenizers` package."""

    def __init__(self, path: str):
        if not Path(path).is_file():
            raise ValueError(f"train.data.tokenizer must name a tokenizer file, got {path!r}")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as e:   # the package raises nothing narrower
            raise ValueError(f"train.data.tokenizer must be a tokenizers JSON file, got {path!r}: {e}") from None
        self.vocab = self._tokenizer.get_vocab_size()

    def encode(self, text: bytes) -> np.ndarray:
        decoded = text.decode("utf-8", errors="replace")
        return np.asarray(self._tokenizer.encode(decoded, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens])


def make_codec(tokenizer: str | None) -> ByteCodec | HuggingFaceCodec:
    return ByteCodec() if tokenizer is None else HuggingFaceCodec(tokenizer)


@dataclass(frozen=True)
class Corpus:
    """Token ids of the training files and of the held-out files."""

    train: np.ndarray
    heldout: np.ndarray
    codec: Any


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = ((p.relative_to(root), p) for p in root.rglob("*.py"))
    return sorted(
        (relative.as_posix(), path)
        for relative, path in files
        # Folders such as config-3.11-x86_64-linux-gnu hold build scripts, which differ by machine.
        if not _SKIPPED_FOLDERS.intersection(relative.parts[:-1])
        and not relative.parts[0].startswith("config-")
    )


def _text_files(pattern: str | None) -> list[tuple[str, Path]]:
    if not pattern:
        raise ValueError("train.data.files must be a glob when train.data.kind = 'text', got nothing")
    paths = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not paths:
        raise ValueError(f"train.data.files must match at least one file, got {pattern!r}")
    # Relative to the glob's fixed part, so that moving the folder does not move the split.
    root = Path(pattern.split("*")[0].split("?")[0].split("[")[0])
    root = root if root.is_dir() else root.parent
    return [(p.relative_to(root).as_posix(), p) for p in paths]


def split_by_hash(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(training, held-out): every tenth name in the order of its hash is held out."""
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    heldout = set(by_hash[::HELD_OUT_ONE_IN])
    return [n for n in names if n not in heldout], [n for n in names if n in heldout]


def _concatenate(paths: Sequence[Path], codec: Any) -> np.ndarray:
    if isinstance(codec, ByteCodec):
        separator = bytes([SEPARATOR_BYTE])
        return codec.encode(separator.join(p.read_bytes() for p in paths))
    pieces: list[np.ndarray] = []
    for path in paths:
        pieces += [codec.encode(path.read_bytes()), np.zeros(1, np.int32)]
    return np.concatenate(pieces)


def _split_tokens(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A single file cannot be split by file, so its tail is held out."""
    cut = len(tokens) - len(tokens) // HELD_OUT_ONE_IN
    return tokens[:cut], tokens[cut:]


def load_corpus(cfg: Any) -> Corpus:
    """The corpus of `cfg.train.data`, split by file into training and held-out tokens."""
    data = cfg.train.data
    codec = make_codec(data.tokenizer)
    if codec.vocab > cfg.model.vocab:
        raise ValueError(
            f"model.vocab must be at least the tokenizer's {codec.vocab}, got {cfg.model.vocab}"
        )
    files = dict(_stdlib_files() if data.kind == "stdlib" else _text_files(data.files))
    if len(files) > 1:
        names, heldout_names = split_by_hash(list(files))
        train = _concatenate([files[n] for n in names], codec)
        heldout = _concatenate([files[n] for n in heldout_names], codec)
    else:
        train, heldout = _split_tokens(_concatenate(list(files.values()), codec))
    for name, tokens in (("training", train), ("held-out", heldout)):
        if len(tokens) < cfg.model.seq + 1:
            raise ValueError(
                f"the {name} text must hold at least model.seq + 1 = {cfg.model.seq + 1} tokens, "
                f"got {len(tokens)} (train.data)"
            )
    return Corpus(train, heldout, codec)


class _Windows:
    """Random access to non-overlapping windows of `length` tokens (neighbours share one token)."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // (self._length - 1)

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * (self._length - 1)
        return self._tokens[start : start + self._length]

    def __repr__(self) -> str:
        # Grain stores the source's repr in its state, so it must not hold an address.
        return f"Windows(length={self._length}, windows={len(self)})"


def train_iterator(
    tokens: np.ndarray, seq: int, batch: int, seed: int, rows: np.ndarray | None = None
) -> Iterator[dict]:
    """Endless {"tokens": [len(rows), seq + 1]}; get_state/set_state resume it.

    batch: rows of the global batch. rows: those that this process loads (all, if None). Every process draws the same
    global order, so neither batches nor the state depend on the number of processes.
    """
    windows = _Windows(tokens, seq + 1)
    if len(windows) < batch:
        raise ValueError(f"train.batch must be at most the {len(windows)} training windows, got {batch}")
    own = np.arange(batch) if rows is None else rows
    dataset = (
        grain.MapDataset.range(len(windows))
        .shuffle(seed=seed)
        .repeat()
        .batch(batch)
        .map(lambda indices: {"tokens": np.stack([windows[i] for i in indices[own]]).astype(np.int32)})
    )
    return iter(dataset.to_iter_dataset())


def rows_of_process(sharding: jax.sharding.Sharding, batch: int) -> np.ndarray:
    """Rows of a global batch that lie on this process's devices, sorted."""
    places = sharding.addressable_devices_indices_map((batch,)).values()
    return np.unique(np.concatenate([np.arange(batch)[place or ()] for place in places]))


def on_devices(local: np.ndarray, rows: np.ndarray, batch: int, sharding: jax.sharding.Sharding) -> jax.Array:
    """The global [batch, ...] array, made from this process's rows of it."""

    def piece(index: Any) -> np.ndarray:
        wanted = np.arange(batch)[index[0]]
        return local[np.searchsorted(rows, wanted)][(slice(None), *index[1:])]

    return jax.make_array_from_callback((batch, *local.shape[1:]), sharding, piece)


def heldout_batches(tokens: np.ndarray, seq: int, batch: int, batches: int) -> list[np.ndarray]:
    """`batches` arrays [batch, seq + 1] of evenly spread windows, the same at every call."""
    starts = np.linspace(0, len(tokens) - (seq + 1), batches * batch).astype(np.int64)
    windows = tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int32)
    return list(windows.reshape(batches, batch, seq + 1))


def _lookup_counts(train_keys: np.ndarray, wanted_keys: np.ndarray) -> np.ndarray:
    keys, counts = np.unique(train_keys, return_counts=True)
    at = np.minimum(np.searchsorted(keys, wanted_keys), len(keys) - 1)
    return np.where(keys[at] == wanted_keys, counts[at], 0).astype(np.float64)


def _ngram_keys(tokens: np.ndarray, n: int, skip: int, vocab: int) -> np.ndarray:
    """Each n-gram ending at positions skip.. of a row as one integer, all rows in one array."""
    ids = np.atleast_2d(tokens).astype(np.int64)
    length = ids.shape[1]
    key = np.zeros((len(ids), length - skip), np.int64)
    for back in range(n - 1, -1, -1):
        key = key * vocab + ids[:, skip - back : length - back]
    return key.reshape(-1)


def ngram_nats(
    train: np.ndarray, heldout: np.ndarray, order: int, vocab: int = BYTE_VOCAB, delta: float = 1.0
) -> float:
    """Held-out nats per token of a count model of `order` tokens (2 bigram, 3 trigram).

    p_n(x | context) = (count(context, x) + delta * p_{n-1}(x)) / (count(context) + delta): each
    order adds `delta` pseudo-counts spread by the next shorter one, down to the uniform p_0.
    A 2-D `heldout` is scored row by row: no n-gram spans two windows.
    """
    if order < 1 or vocab**order >= 2**63:
        raise ValueError(f"order must be at least 1 with vocab**order below 2**63, got {order}")
    if min(train.shape[-1], heldout.shape[-1]) < order:
        raise ValueError(f"order must be at most the text's length, got {order}")
    skip = order - 1
    prob: np.ndarray | float = 1.0 / vocab
    for n in range(1, order + 1):
        wanted = _ngram_keys(heldout, n, skip, vocab)
        seen = _ngram_keys(train, n, skip, vocab)
        count = _lookup_counts(seen, wanted)
        # Contexts are the same n-grams less their last token, so counts stay consistent.
        total = _lookup_counts(seen // vocab, wanted // vocab)
        prob = (count + delta * prob) / (total + delta)
    return float(-np.mean(np.log(prob)))
