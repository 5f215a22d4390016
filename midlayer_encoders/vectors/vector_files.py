"""Write the vectors of many layers to one .npy, .safetensors or .parquet file, block by block.

Blocks are written, not memory-mapped: on a full disk a mapped file kills the process, while a write raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import atomic_write, write_file

_BLOCK_BYTES = 128 * 2**20
_DTYPES = {"float32": "F32", "int64": "I64", "bool": "BOOL"}  # in NumPy and in safetensors

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """The vectors of N inputs at some layers, read in blocks.

    Attributes:
        layers: layers in the order of the file.
        names: the text or path of each input; ``None`` if it has none.
        dim: number D of dimensions.
        chunk: number of inputs per store; a block does not cross a chunk.
        read: returns the vectors ``(rows, D)`` of a layer for a range of inputs.
        done: called with the number of vectors written.
    """

    layers: Sequence[int]
    names: Sequence[str | None]
    dim: int
    chunk: int
    read: Callable[[int, int, int], Rows]
    done: Callable[[int], None]

    def __iter__(self) -> Iterator[tuple[int, int, Iterator[Rows]]]:
        """Yield the start and end of each block of inputs, and its vectors layer by layer."""
        rows = max(1, _BLOCK_BYTES // (4 * self.dim * len(self.layers)))
        for first in range(0, len(self.names), self.chunk):
            last = min(first + self.chunk, len(self.names))
            for start in range(first, last, rows):
                end = min(start + rows, last)
                yield start, end, self._vectors(start, end)

    def _vectors(self, start: int, end: int) -> Iterator[Rows]:
        for layer in self.layers:
            yield self.read(layer, start, end)
            self.done(end - start)

    def write(self, file: BinaryIO) -> None:
        """Write all vectors from the file's position, one layer after another: ``(L, N, D)``."""
        offset = file.tell()
        row_bytes = 4 * self.dim
        for start, _, vectors in self:
            for number, rows in enumerate(vectors):
                file.seek(offset + row_bytes * (number * len(self.names) + start))
                file.write(np.ascontiguousarray(rows).data)


def check_suffix(out: Path) -> None:
    """Raise unless the file's suffix is a supported format."""
    if out.suffix not in _WRITERS:
        raise OptionError(
            f"`out` must end in {', '.join(_WRITERS)}, which selects the format, but got {out.name!r}."
            f"{did_you_mean(out.suffix, _WRITERS)}"
        )


def write_vectors(out: Path, blocks: Blocks, metadata: Mapping[str, Any]) -> None:
    """Write vectors and their metadata atomically, in the format of the suffix.

    Args:
        out: ``.npy`` holds ``(L, N, D)``, with the metadata in a ``.json`` next to it; ``.safetensors`` a tensor
            ``layer.K`` ``(N, D)`` per layer; ``.parquet`` a row per input and a column ``layer_K`` per layer. The last
            two hold the metadata under ``midlayer``.
        blocks: vectors to write.
        metadata: description of the vectors.
    """
    check_suffix(out)
    _WRITERS[out.suffix](out, blocks, metadata)


def _write_npy(out: Path, blocks: Blocks, metadata: Mapping[str, Any]) -> None:
    shape = len(blocks.layers), len(blocks.names), blocks.dim
    label = out.with_name(f"{out.name}.json")
    with atomic_write(out) as temporary:
        with temporary.open("xb") as file:
            np.lib.format.write_array_header_2_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            blocks.write(file)
        label.unlink(missing_ok=True)  # it describes the previous file
    write_file(label, json.dumps(metadata, indent=2).encode())


def _write_safetensors(out: Path, blocks: Blocks, metadata: Mapping[str, Any]) -> None:
    shape = len(blocks.names), blocks.dim
    with atomic_write(out) as temporary, temporary.open("xb") as file:
        file.write(_safetensors_header({f"layer.{layer}": ("float32", shape) for layer in blocks.layers}, metadata))
        blocks.write(file)


Tensor = tuple[str, Sequence[int], Iterable[npt.NDArray[Any]]]
"""NumPy's name of the dtype, the shape, and the blocks of a tensor."""


def write_safetensors(out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors block by block."""
    with atomic_write(out) as temporary, temporary.open("xb") as file:
        header = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
        file.write(_safetensors_header(header, metadata))
        for _, _, blocks in tensors.values():
            for block in blocks:
                file.write(np.ascontiguousarray(block).data)


def _safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, Any]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"midlayer": json.dumps(metadata)}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end += int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        table[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_parquet(out: Path, blocks: Blocks, metadata: Mapping[str, Any]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.float32(), blocks.dim)
    fields = [pa.field("input", pa.string()), *(pa.field(f"layer_{layer}", vector) for layer in blocks.layers)]
    schema = pa.schema(fields, metadata={"midlayer": json.dumps(metadata)})
    with atomic_write(out) as temporary, parquet.ParquetWriter(temporary, schema, use_dictionary=False) as writer:
        for start, end, vectors in blocks:
            columns: list[Any] = [pa.array(blocks.names[start:end], pa.string())]
            for rows in vectors:
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), blocks.dim))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


_WRITERS: Mapping[str, Callable[[Path, Blocks, Mapping[str, Any]], None]] = {
    ".npy": _write_npy,
    ".safetensors": _write_safetensors,
    ".parquet": _write_parquet,
}
