"""Stores filled with vectors that can be recomputed, here and in other processes."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

LAYERS = [0, 1, 2, 5]
DIM = 6


def expected_vectors(numbers: Sequence[int], layers: Sequence[int] = LAYERS, dim: int = DIM) -> np.ndarray:
    """Return the expected vectors of the texts with these numbers, shape ``(L, N, D)``."""
    layer, number, dimension = np.ix_(layers, np.array(numbers, dtype=int), range(dim))
    waves = np.sin(layer * 1.7 + number * 0.9 + dimension * 2.3)
    return (waves * 10).astype(np.float32)


def make_keys(numbers: Sequence[int]) -> list[str]:
    return [text_key(f"text {number}") for number in numbers]


def open_store(root: Path, **options) -> EmbeddingStore:
    return EmbeddingStore(root, **{"key": "k", "layers": LAYERS, "dim": DIM, **options})


def shard_paths(store: EmbeddingStore) -> list[Path]:
    return sorted(store.folder.glob("*.safetensors"))


def check_vectors(store: EmbeddingStore, numbers: Sequence[int]) -> None:
    """Compare every vector at every layer with its expected value."""
    expected = expected_vectors(numbers, store.layers, store.dim)
    for position, layer in enumerate(store.layers):
        np.testing.assert_array_equal(store.read(layer, make_keys(numbers)), expected[position])


def fill(store: EmbeddingStore, numbers: Sequence[int], batch: int = 4) -> None:
    for start in range(0, len(numbers), batch):
        part = numbers[start : start + batch]
        store.write(make_keys(part), expected_vectors(part, store.layers, store.dim))


# In another process: the expected values from here, and a batch at a time, each reported once it is written.
CHILD = """
import os, signal, sys
sys.path.insert(0, {root_of_tests!r})
from pathlib import Path
from midlayer_encoders import files
from midlayer_encoders.sweeping import store as module
from tests.store.filling import fill, open_store

def kill_self(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

store = open_store(Path({root!r}))
print("ready", flush=True)
{body}
"""


@contextmanager
def start_child(root: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    code = CHILD.format(root_of_tests=str(Path(__file__).parents[2]), root=str(root), body=textwrap.dedent(body))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def run_child(root: Path, body: str) -> int:
    with start_child(root, body) as process:
        return process.wait(timeout=20)
