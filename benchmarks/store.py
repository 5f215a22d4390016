"""Compare the store with two other ways to store the same vectors.

`python benchmarks/store.py > benchmarks/results/store.md`

All three write each batch to disk (fsync) before the next. LMDB is included if `lmdb` is installed.
"""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

LAYERS, DIM, TEXTS = 31, 576, 8192
Array = np.ndarray[Any, np.dtype[np.float32]]


class _Way(Protocol):
    def write(self, keys: Sequence[str], embeddings: Array) -> None: ...

    def read(self, layer: int, keys: Sequence[str]) -> Array: ...


def shards(folder: Path) -> _Way:
    return EmbeddingStore(folder, key="bench", layers=range(LAYERS), dim=DIM)


class _Lmdb:
    """One value for each text and layer, so that a layer can be read without the others."""

    def __init__(self, folder: Path) -> None:
        import lmdb

        self.env = lmdb.open(str(folder), map_size=16 * 2**30)

    def write(self, keys: Sequence[str], embeddings: Array) -> None:
        with self.env.begin(write=True) as transaction:
            for layer, rows in enumerate(embeddings):
                for key, row in zip(keys, rows, strict=True):
                    transaction.put(bytes([layer]) + bytes.fromhex(key), row.tobytes())

    def read(self, layer: int, keys: Sequence[str]) -> Array:
        found = np.empty((len(keys), DIM), dtype=np.float32)
        with self.env.begin(buffers=True) as transaction:
            for place, key in enumerate(keys):
                found[place] = np.frombuffer(transaction.get(bytes([layer]) + bytes.fromhex(key)), dtype=np.float32)
        return found


class _NpySqlite:
    """A file of rows for each layer, and SQLite for which row is whose."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / f"{layer}.f32" for layer in range(LAYERS)]
        self.index = sqlite3.connect(folder / "index.sqlite")
        self.index.execute("PRAGMA journal_mode=WAL")
        self.index.execute("PRAGMA synchronous=FULL")
        self.index.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, number INTEGER)")

    def write(self, keys: Sequence[str], embeddings: Array) -> None:
        first = self.index.execute("SELECT COALESCE(MAX(number) + 1, 0) FROM rows").fetchone()[0]
        for path, rows in zip(self.paths, embeddings, strict=True):
            with path.open("r+b" if path.exists() else "xb") as file:
                file.seek(first * DIM * 4)
                file.write(np.ascontiguousarray(rows).data)
                file.flush()
                os.fsync(file.fileno())
        with self.index:
            self.index.executemany("INSERT INTO rows VALUES (?, ?)", [(key, first + i) for i, key in enumerate(keys)])

    def read(self, layer: int, keys: Sequence[str]) -> Array:
        numbers = dict(self.index.execute("SELECT key, number FROM rows"))
        rows = np.memmap(self.paths[layer], dtype=np.float32, mode="r").reshape(-1, DIM)
        found: Array = rows[[numbers[key] for key in keys]]
        return found


def forget_cached(folder: Path) -> None:
    """Ask the system to drop the folder's files from its cache, so that the next read comes from the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def batches(size: int) -> Iterator[tuple[slice, Array]]:
    draw = np.random.default_rng(0)
    whole = draw.standard_normal((LAYERS, size, DIM), dtype=np.float32)
    for start in range(0, TEXTS, size):
        whole[:, :, 0] = np.arange(start, start + size)  # the text's number, compared when it is read
        yield slice(start, start + size), whole


def measure(make: Callable[[Path], _Way], size: int) -> str:
    keys = [text_key(f"text {number}") for number in range(TEXTS)]
    some = np.random.default_rng(1).permutation(TEXTS)[:1000]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        times: list[float] = []
        written = make(folder)
        for part, embeddings in batches(size):
            times.append(seconds(partial(written.write, keys[part], embeddings)))
        del written
        forget_cached(folder)
        if not (make(folder).read(7, keys)[:, 0] == np.arange(TEXTS)).all():
            raise SystemExit(f"{make} has mixed up texts")
        forget_cached(folder)
        opened: list[_Way] = []
        opening = seconds(lambda: opened.append(make(folder)))
        cold = seconds(lambda: opened[0].read(7, keys))
        warm = seconds(lambda: opened[0].read(7, keys))
        few = seconds(lambda: opened[0].read(7, [keys[place] for place in some]))
        room = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        files = sum(path.is_file() for path in folder.rglob("*"))
        opened.clear()
    data = TEXTS * LAYERS * DIM * 4
    cells = (
        f"{TEXTS / sum(times):.0f}",
        f"{data / sum(times) / 1e6:.0f}",
        *(f"{1000 * t:.0f}" for t in (max(times), opening, cold, warm, few)),
        f"{room / data:.2f}",
        str(files),
    )
    return " | ".join(cells)


GROWTH = """
import sys, time
from pathlib import Path
from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

count = int(sys.argv[2])
store = EmbeddingStore(sys.argv[1], key="bench", layers=range({layers}), dim={dim}, dtype="float16")
keys = [text_key(f"text {{number}}") for number in range(count)]
before = peak()
start = time.perf_counter()
read = store.read(7, keys)
took = time.perf_counter() - start
after = peak()
assert (read[:, 0] == [number % 128 for number in range(count)]).all()
check, again = seconds(lambda: store.missing(keys)), seconds(lambda: store.missing(keys))
cells = (count, f"{{took * 1e3:.0f}}", f"{{read.nbytes / 2**20:.0f}}", f"{{after - before:.0f}}", f"{{check:.2f}}",
         f"{{again * 1e3:.0f}}", f"{{before:.0f}}")
print("|", " | ".join(map(str, cells)), "|", flush=True)
"""


def growth() -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:

        def make() -> EmbeddingStore:
            return EmbeddingStore(name, key="bench", layers=range(LAYERS), dim=DIM, dtype="float16")

        store = make()
        rows = np.random.default_rng(0).standard_normal((LAYERS, 128, DIM), dtype=np.float32)
        rows[:, :, 0] = np.arange(128)
        start = time.perf_counter()
        for first in range(0, 100_096, 128):
            store.write([text_key(f"text {number}") for number in range(first, first + 128)], rows)
        took = time.perf_counter() - start
        files = list(store.folder.glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        print(f"\n100,096 texts in batches of 128, float16: written in {took:.0f} s ({100_096 / took:.0f} texts/s,")
        print(f"{size / took / 1e6:.0f} MB/s), {size / 1e9:.2f} GB in {len(files)} shards;", end=" ")
        print(f"opened in {1e3 * seconds(make):.0f} ms.\n")
        print(
            "| texts read | one layer, ms | size, MiB | added peak memory, MiB | `missing`, s | second call, ms | memory before, MiB |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        for count in (1_000, 10_000, 100_000):
            subprocess.run([sys.executable, "-c", GROWTH.format(layers=LAYERS, dim=DIM), name, str(count)], check=True)
    print("\n`missing` verifies the checksums of all layers of the shards that contain the texts, once per object.")


HEAD = """# The embedding store

Write and read speed of the store, compared with row files plus SQLite and with LMDB. `python benchmarks/store.py`: Python {python}, {cores} cores, {texts} texts x {layers} layers x {dim}, float32. Each store
writes a batch to disk (fsync) before the next. "Cold" reads follow after the files are dropped from the system's cache.
Ours verifies checksums when it first reads a layer; the others have none. "1000 texts" are drawn at random. "Size" is
disk space relative to the vectors.

| store | batch | texts/s written | MB/s | slowest batch, ms | open, ms | one layer cold, ms | warm, ms | 1000 texts, ms | size | files |
|---|---|---|---|---|---|---|---|---|---|---|"""


def main() -> None:
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    print(HEAD.format(**machine, texts=TEXTS, layers=LAYERS, dim=DIM))
    ways: dict[str, Callable[[Path], _Way]] = {"shards (ours)": shards, "row files and SQLite": _NpySqlite}
    try:
        import lmdb

        ways[f"LMDB {lmdb.__version__}"] = _Lmdb
    except ImportError:
        print("| LMDB (not installed) |")
    for size in (32, 128, 256):
        for name, make in ways.items():
            print(f"| {name} | {size} | {measure(make, size)} |", flush=True)
    growth()


if __name__ == "__main__":
    main()
