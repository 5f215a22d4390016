"""Read and write one shard: an immutable safetensors file with checksums.

A shard holds the keys of its texts ``(N, 16)`` and the rows ``(N, D)`` of each layer. Its metadata carry a CRC-32 of
each layer's rows and one of the keys and the other metadata.
"""

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.files import atomic_write

FORMAT = "midlayer embeddings 1"
DTYPES = {"float16": "F16", "float32": "F32"}  # in NumPy and in safetensors
KEY_BYTES = 16
THREADS = min(8, os.cpu_count() or 1)  # for checksums and copies


class StoreError(MidlayerError):
    """A store cannot be used."""


class TextNotStoredError(StoreError, LookupError):
    """A text was never stored, or its shard was damaged and set aside."""


class DamagedError(StoreError):
    """The content of a shard differs from what was written. Only the store handles this error."""


@dataclass(frozen=True)
class Shard:
    """A shard: its file and metadata.

    Attributes:
        path: the file.
        store: key of its store.
        layers: layers of its rows.
        count: number N of texts.
        dim: number D of dimensions.
        dtype: NumPy's name of the rows' dtype.
        checksums: CRC-32 of each layer's rows.
    """

    path: Path
    store: str
    layers: tuple[int, ...]
    count: int
    dim: int
    dtype: str
    checksums: tuple[int, ...]

    def metadata(self, keys: bytes) -> dict[str, str]:
        """Return the file's metadata, with a checksum of the keys and of all other fields."""
        fields = {
            "format": FORMAT,
            "store": self.store,
            "layers": json.dumps(self.layers),
            "checksums": " ".join(f"{checksum:08x}" for checksum in self.checksums),
        }
        head = json.dumps([fields, self.count, self.dim, self.dtype]).encode()
        return {**fields, "checksum": f"{zlib.crc32(keys, zlib.crc32(head)):08x}"}

    @contextmanager
    def _open_layers(self, layers: Iterable[int]) -> Iterator[dict[int, Any]]:
        """Yield the rows of layers, to be sliced; nothing is read before."""
        try:
            with safe_open(self.path, framework="numpy") as file:
                slices = {layer: file.get_slice(f"layer.{layer}") for layer in layers}
                if any(rows.get_shape() != [self.count, self.dim] for rows in slices.values()):
                    raise DamagedError("its shape has changed")
                yield slices
        except SafetensorError as error:
            raise DamagedError(f"it is not a complete safetensors file: {error}") from error

    def verify(self, layers: Iterable[int]) -> None:
        """Verify the checksums of the rows of layers."""
        with self._open_layers(layers) as slices:
            for layer, rows in slices.items():
                if zlib.crc32(rows[:].data) != self.checksums[self.layers.index(layer)]:
                    raise DamagedError(f"the rows of layer {layer} do not match their checksum")

    def read(self, layer: int, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """Return some rows of a layer, given in ascending order."""
        first, last = int(rows[0]), int(rows[-1])
        with self._open_layers([layer]) as slices:
            block: npt.NDArray[Any] = slices[layer][first : last + 1]
        return block if np.array_equal(rows, np.arange(first, last + 1)) else block[rows - first]


def read_head(path: Path) -> tuple[Shard, list[bytes]]:
    """Return a shard and its keys after verifying their checksum and the file's length."""
    if path.is_symlink() and not path.exists():
        raise DamagedError("it is a dangling link")
    if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would never end
        raise DamagedError("it is not a regular file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            layers = tuple(json.loads(metadata["layers"]))
            first = file.get_slice(f"layer.{layers[0]}")
            count, dim = first.get_shape()
            shard = Shard(
                path=path,
                store=metadata["store"],
                layers=layers,
                count=count,
                dim=dim,
                dtype=next(name for name, code in DTYPES.items() if code == first.get_dtype()),
                checksums=tuple(int(checksum, 16) for checksum in metadata["checksums"].split()),
            )
            keys = file.get_tensor("keys").tobytes()
            complete = set(file.keys()) == {"keys", *(f"layer.{layer}" for layer in layers)}
    except SafetensorError as error:
        raise DamagedError(f"it is not a complete safetensors file: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, StopIteration) as error:
        raise DamagedError("its metadata cannot be read") from error
    if not complete or metadata != shard.metadata(keys):
        raise DamagedError("its metadata or keys do not match their checksum")
    return shard, [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def write_shard(
    path: Path, store: str, layers: tuple[int, ...], keys: Sequence[bytes], embeddings: npt.NDArray[Any]
) -> Shard:
    """Write the embeddings ``(L, N, D)`` of texts and return their shard."""
    _, count, dim = embeddings.shape
    with ThreadPoolExecutor(THREADS) as pool:
        checksums = tuple(pool.map(zlib.crc32, embeddings))
    shard = Shard(path, store, layers, count, dim, embeddings.dtype.name, checksums)
    joined = b"".join(keys)
    tensors = {f"layer.{layer}": rows for layer, rows in zip(layers, embeddings, strict=True)}
    tensors["keys"] = np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES)
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, shard.metadata(joined))
    return shard
