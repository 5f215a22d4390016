"""Vectors of many layers in one file: NumPy's, safetensors' or parquet, written in parts, whole or not there.

Blocks go to the file one after another and nothing is mapped to be written: on a full disk a mapped file ends the
process, where a write is an error that can be named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import atomic_write, write_file

__all__ = ["SUFFIXES", "Blocks", "check_suffix", "write_safetensors", "write_vectors"]

_BLOCK_BYTES = 128 * 2**20  # of the vectors that are in memory at a time
_DTYPES = {"float32": "F32", "int64": "I64", "bool": "BOOL"}  # numpy's names and those of safetensors

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Blocks:
    """The vectors of N inputs at some layers, read in blocks.

    Attributes:
        layers: in the order of the file.
        names: of the inputs: the text, or the path of a file; ``None`` for one that has no name.
        dim: number D of dimensions.
        chunk: inputs that lie in one place: no block reaches over its end.
        read: returns the vectors ``(rows, D)`` of a layer from one input to before another.
        done: called with the number of vectors written.
    """

    layers: Sequence[int]
    names: Sequence[str | None]
    dim: int
    chunk: int
    read: Callable[[int, int, int], Rows]
    done: Callable[[int], None]

    def __iter__(self) -> Iterator[tuple[int, int, Iterator[Rows]]]:
        """Yield where each block of inputs begins and ends, and its vectors layer by layer."""
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

    def put(self, file: BinaryIO) -> None:
        """Write all vectors from where the file stands, one layer after another: ``(L, N, D)``."""
        begin, row = file.tell(), 4 * self.dim
        for start, _, vectors in self:
            for number, rows in enumerate(vectors):
                file.seek(begin + row * (number * len(self.names) + start))
                _put(file, rows)


def check_suffix(out: Path) -> None:
    """Raise unless a file's suffix is one that vectors are written as."""
    if out.suffix not in SUFFIXES:
        raise OptionError(
            f"`out` must end in {', '.join(SUFFIXES)}, which says how vectors are written, but got {out.name!r}."
            f"{did_you_mean(out.suffix, SUFFIXES)}"
        )


def write_vectors(out: Path, blocks: Blocks, about: Mapping[str, Any]) -> None:
    """Write vectors, and what they are, as the suffix says: the whole file is there afterwards, or the one before.

    Args:
        out: ``.npy`` holds ``(L, N, D)``, with ``about`` in a ``.json`` beside it; ``.safetensors`` a tensor
            ``layer.K`` ``(N, D)`` for each layer; ``.parquet`` a row for each input and a column ``layer_K`` for each
            layer. The last two carry ``about`` in their metadata, under ``midlayer``.
        blocks: what to write.
        about: what the vectors are.
    """
    check_suffix(out)
    SUFFIXES[out.suffix](out, blocks, about)


def _npy(out: Path, blocks: Blocks, about: Mapping[str, Any]) -> None:
    shape = len(blocks.layers), len(blocks.names), blocks.dim
    head = {"descr": "<f4", "fortran_order": False, "shape": shape}
    label = out.with_name(f"{out.name}.json")
    with atomic_write(out) as aside:
        with aside.open("xb") as file:
            np.lib.format.write_array_header_2_0(file, head)
            blocks.put(file)
        label.unlink(missing_ok=True)  # the old one must not be taken for the new file's
    write_file(label, json.dumps(about, indent=2).encode())


def _safetensors(out: Path, blocks: Blocks, about: Mapping[str, Any]) -> None:
    shape = len(blocks.names), blocks.dim
    with atomic_write(out) as aside, aside.open("xb") as file:
        file.write(_safetensors_head({f"layer.{layer}": ("float32", shape) for layer in blocks.layers}, about))
        blocks.put(file)


def write_safetensors(out: Path, parts: Mapping[str, tuple[str, Sequence[int], Any]], about: Mapping[str, Any]) -> None:
    """Write tensors that are made block by block: numpy's name of the dtype, the shape, and the blocks of each."""
    with atomic_write(out) as aside, aside.open("xb") as file:
        file.write(_safetensors_head({name: (dtype, shape) for name, (dtype, shape, _) in parts.items()}, about))
        for _, _, some in parts.values():
            for block in some:
                _put(file, block)


def _safetensors_head(parts: Mapping[str, tuple[str, Sequence[int]]], about: Mapping[str, Any]) -> bytes:
    """Return what stands before the tensors: which there are, and where each begins and ends."""
    table: dict[str, Any] = {"__metadata__": {"midlayer": json.dumps(about)}}
    end = 0
    for name, (dtype, shape) in parts.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        table[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end := end + size]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _put(file: BinaryIO, block: npt.NDArray[Any]) -> None:
    file.write(np.ascontiguousarray(block).data)


def _parquet(out: Path, blocks: Blocks, about: Mapping[str, Any]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    kind = pa.list_(pa.float32(), blocks.dim)
    fields = [pa.field("input", pa.string()), *(pa.field(f"layer_{layer}", kind) for layer in blocks.layers)]
    schema = pa.schema(fields, metadata={"midlayer": json.dumps(about)})
    with (
        atomic_write(out) as aside,
        _closing_quietly(parquet.ParquetWriter(aside, schema, use_dictionary=False)) as writer,
    ):
        for start, end, vectors in blocks:
            columns: list[Any] = [pa.array(blocks.names[start:end], pa.string())]
            for rows in vectors:
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), blocks.dim))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


@contextmanager
def _closing_quietly(writer: Any) -> Iterator[Any]:
    """Close a writer; where writing failed, as on a full disk, its own failure to end the file is not the news."""
    try:
        yield writer
    except BaseException:
        with suppress(OSError):
            writer.close()
        raise
    writer.close()


SUFFIXES: Mapping[str, Callable[[Path, Blocks, Mapping[str, Any]], None]] = {
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".parquet": _parquet,
}
"""How vectors are written, by the suffix of the file."""
