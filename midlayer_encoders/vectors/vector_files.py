"""Write the vectors of many layers to one .npy, .safetensors or .parquet file, block by block.

Blocks are written, not memory-mapped: on a full disk a mapped file kills the process, while a write raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import atomic_write, write_file

_SUFFIXES = (".npy", ".safetensors", ".parquet")
_DTYPES = {"float32": "F32", "int64": "I64", "bool": "BOOL"}  # in NumPy and in safetensors

Blocks: TypeAlias = Iterable[tuple[int, list[npt.NDArray[np.float32]]]]
"""The first input of each block, and its vectors ``(rows, D)`` at each layer."""

Tensor = tuple[str, Sequence[int], Iterable[npt.NDArray[Any]]]
"""NumPy's name of the dtype, the shape, and the blocks of a tensor."""


def check_suffix(out: Path) -> None:
    """Raise unless the file's suffix is a supported format."""
    if out.suffix not in _SUFFIXES:
        raise OptionError(
            f"`out` must end in {', '.join(_SUFFIXES)}, which selects the format, but got {out.name!r}."
            f"{did_you_mean(out.suffix, _SUFFIXES)}"
        )


def write_vectors(
    out: Path, layers: Sequence[int], names: Sequence[str | None], dim: int, blocks: Blocks, metadata: Mapping[str, Any]
) -> None:
    """Write vectors and their metadata atomically, in the format of the suffix.

    Args:
        out: ``.npy`` holds ``(L, N, D)``, with the metadata in a ``.json`` next to it; ``.safetensors`` a tensor
            ``layer.K`` ``(N, D)`` per layer; ``.parquet`` a row per input and a column ``layer_K`` per layer. The last
            two hold the metadata under ``midlayer``.
        layers: layers in the order of the file.
        names: the text or path of each input; ``None`` if it has none.
        dim: number D of dimensions.
        blocks: vectors to write.
        metadata: description of the vectors.
    """
    if out.suffix == ".parquet":
        _write_parquet(out, layers, names, dim, blocks, metadata)
        return
    label = out.with_name(f"{out.name}.json")
    with atomic_write(out) as temporary:
        with temporary.open("xb") as file:
            if out.suffix == ".npy":
                shape = len(layers), len(names), dim
                np.lib.format.write_array_header_2_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            else:
                tensors = {f"layer.{layer}": ("float32", (len(names), dim)) for layer in layers}
                file.write(_safetensors_header(tensors, metadata))
            offset = file.tell()
            for start, vectors in blocks:
                for number, rows in enumerate(vectors):
                    file.seek(offset + 4 * dim * (number * len(names) + start))
                    file.write(np.ascontiguousarray(rows).data)
        if out.suffix == ".npy":
            label.unlink(missing_ok=True)  # it describes the previous file
    if out.suffix == ".npy":
        write_file(label, json.dumps(metadata, indent=2).encode())


def _write_parquet(
    out: Path, layers: Sequence[int], names: Sequence[str | None], dim: int, blocks: Blocks, metadata: Mapping[str, Any]
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.float32(), dim)
    fields = [pa.field("input", pa.string()), *(pa.field(f"layer_{layer}", vector) for layer in layers)]
    schema = pa.schema(fields, metadata={"midlayer": json.dumps(metadata)})
    with atomic_write(out) as temporary:
        writer = parquet.ParquetWriter(temporary, schema, use_dictionary=False)
        try:
            for start, vectors in blocks:
                columns: list[Any] = [pa.array(names[start : start + len(vectors[0])], pa.string())]
                for rows in vectors:
                    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), dim))
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
        except BaseException:
            with suppress(OSError):  # the first error counts, for example a full disk
                writer.close()
            raise
        writer.close()


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
