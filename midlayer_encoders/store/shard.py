"""One shard: a safetensors file that is whole or not there, is never changed, and knows when it is damaged.

The file: a head, the keys of the texts ``(N, 16)``, then the rows ``(N, D)`` of each layer. The head carries a CRC-32
of each layer's rows and one of everything else. Any safetensors reader can open it.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.files import beside

__all__ = [
    "DTYPES",
    "FORMAT",
    "KEY_BYTES",
    "DamagedError",
    "Shard",
    "StoreError",
    "TextNotStoredError",
    "map_rows",
    "read_head",
    "write_shard",
]

FORMAT = "midlayer embeddings 1"
DTYPES = {"float16": "F16", "float32": "F32"}  # numpy's names and those of safetensors
KEY_BYTES = 16


class StoreError(MidlayerError):
    """A store that cannot be used as it is."""


class TextNotStoredError(StoreError, LookupError):
    """A text that was never stored, or whose shard was found damaged and set aside."""


class DamagedError(StoreError):
    """A shard whose bytes are not those that were written. It does not leave the store."""


@dataclass(frozen=True)
class Shard:
    """What the head of a shard says.

    Attributes:
        store: key of the store that it belongs to.
        layers: layers of its rows, in the order of the file.
        count: number N of texts.
        dim: number D of dimensions.
        dtype: of the rows, by numpy's name.
        checksums: CRC-32 of each layer's rows.
    """

    store: str
    layers: tuple[int, ...]
    count: int
    dim: int
    dtype: str
    checksums: tuple[int, ...]

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer's rows."""
        return self.count * self.dim * np.dtype(self.dtype).itemsize

    @cached_property
    def rows_start(self) -> int:
        """Where in the file the first layer's rows begin."""
        return len(self.head(b"")) + self.count * KEY_BYTES

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.rows_start + len(self.layers) * self.layer_bytes

    def head(self, keys: bytes) -> bytes:
        """Return the length and text of the safetensors head. It takes as many bytes whatever the checksums are."""
        named = {"format": FORMAT, "store": self.store, "layers": json.dumps(self.layers)}
        named["checksums"] = " ".join(f"{checksum:08x}" for checksum in self.checksums)
        said = json.dumps([named, self.count, self.dim, self.dtype]).encode()
        named["checksum"] = f"{zlib.crc32(keys, zlib.crc32(said)):08x}"  # of all but the rows
        end = self.count * KEY_BYTES
        table: dict[str, object] = {
            "__metadata__": named,
            "keys": {"dtype": "U8", "shape": [self.count, KEY_BYTES], "data_offsets": [0, end]},
        }
        for layer in self.layers:
            offsets = [end, end := end + self.layer_bytes]
            shape = [self.count, self.dim]
            table[f"layer.{layer}"] = {"dtype": DTYPES[self.dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def read_head(path: Path) -> tuple[Shard, list[bytes]]:
    """Return a shard and its keys, once their checksum and the file's length are right."""
    if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would never end
        raise DamagedError("it is no ordinary file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > size:
            raise DamagedError("its head is cut off")
        written = file.read(length)
        try:
            shard = _shard_of(json.loads(written))
            whole = shard.size
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError("its head cannot be read") from error
        if size != whole:
            raise DamagedError(f"it has {size} bytes instead of {whole}")
        keys = file.read(shard.count * KEY_BYTES)
    if shard.head(keys)[8:] != written:
        raise DamagedError("its head or keys do not match their checksum")
    return shard, [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def _shard_of(table: dict[str, Any]) -> Shard:
    named = table["__metadata__"]
    layers = tuple(json.loads(named["layers"]))
    first = table[f"layer.{layers[0]}"]
    return Shard(
        store=named["store"],
        layers=layers,
        count=first["shape"][0],
        dim=first["shape"][1],
        dtype={theirs: ours for ours, theirs in DTYPES.items()}[first["dtype"]],
        checksums=tuple(int(checksum, 16) for checksum in named["checksums"].split()),
    )


def map_rows(path: Path, shard: Shard, layer: int, *, check: bool) -> npt.NDArray[Any]:
    """Return the rows of a layer, shape ``(N, D)``, mapped into memory; ``check`` compares their checksum."""
    place = shard.layers.index(layer)
    start = shard.rows_start + place * shard.layer_bytes
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != shard.size:  # to touch mapped bytes that are not there ends the process
            raise DamagedError("its length has changed")
        if check and hasattr(os, "posix_fadvise"):  # all of it will be read: faster at once than page by page
            os.posix_fadvise(file.fileno(), start, shard.layer_bytes, os.POSIX_FADV_WILLNEED)
        rows = np.memmap(file, dtype=shard.dtype, mode="r", offset=start, shape=(shard.count, shard.dim))
    if check and zlib.crc32(rows.data) != shard.checksums[place]:
        raise DamagedError(f"the rows of layer {layer} do not match their checksum")
    return rows


def write_shard(path: Path, shard: Shard, keys: Sequence[bytes], rows: Iterable[Iterable[npt.NDArray[Any]]]) -> Shard:
    """Write a shard from the blocks of rows of each layer, and return it with their checksums."""
    checksums, joined = [], b"".join(keys)
    with beside(path) as aside, aside.open("xb") as file:
        file.write(replace(shard, checksums=(0,) * len(shard.layers)).head(b"") + joined)
        for blocks in rows:
            checksum = 0
            for block in map(np.ascontiguousarray, blocks):
                checksum = zlib.crc32(block.data, checksum)
                file.write(block.data)
            checksums.append(checksum)
        shard = replace(shard, checksums=tuple(checksums))
        file.seek(0)
        file.write(shard.head(joined))
    return shard
