"""Stores filled with vectors that can be worked out again, here and in other processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from midlayer_encoders.store import EmbeddingStore, text_key

LAYERS = [0, 1, 2, 5]
DIM = 6


def vectors(numbers: Sequence[int], layers: Sequence[int] = LAYERS, dim: int = DIM) -> np.ndarray:
    """Return what the texts with these numbers embed to, shape ``(L, N, D)``: the oracle."""
    layer, number, dimension = np.ix_(layers, np.array(numbers, dtype=int), range(dim))
    waves = np.sin(layer * 1.7 + number * 0.9 + dimension * 2.3)
    return (waves * 10).astype(np.float32)


def keys_of(numbers: Sequence[int]) -> list[str]:
    return [text_key(f"text {number}") for number in numbers]


def opened(root: Path, **options) -> EmbeddingStore:
    return EmbeddingStore(root, **{"key": "k", "layers": LAYERS, "dim": DIM, **options})


def shards_of(store: EmbeddingStore) -> list[Path]:
    return sorted(store.folder.glob("*.safetensors"))


def check(store: EmbeddingStore, numbers: Sequence[int]) -> None:
    """Compare every vector at every layer with what it must be."""
    expected = vectors(numbers, store.layers, store.dim)
    for place, layer in enumerate(store.layers):
        np.testing.assert_array_equal(store.read(layer, keys_of(numbers)), expected[place])


def fill(store: EmbeddingStore, numbers: Sequence[int], batch: int = 4) -> None:
    for start in range(0, len(numbers), batch):
        part = numbers[start : start + batch]
        store.write(keys_of(part), vectors(part, store.layers, store.dim))


# In another process: the oracle from here, and a batch at a time, each told once it is written.
CHILD = """
import os, signal, sys
sys.path.insert(0, {root_of_tests!r})
from pathlib import Path
from midlayer_encoders import files
from midlayer_encoders.store import shard
from tests.store.filling import fill, opened

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

store = opened(Path({root!r}))
print("ready", flush=True)
{body}
"""


@contextmanager
def child(root: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    code = CHILD.format(root_of_tests=str(Path(__file__).parents[2]), root=str(root), body=textwrap.dedent(body))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def run_child(root: Path, body: str) -> int:
    with child(root, body) as process:
        return process.wait(timeout=20)
