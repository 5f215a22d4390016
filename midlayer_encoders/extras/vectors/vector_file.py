"""Files of vectors: NumPy arrays, safetensors and Parquet.

They are written block by block, not memory-mapped: on a full disk a mapped file kills the process, while a write raises
an error.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from midlayer_encoders.files import atomic_write, write_file

#: The first input of each block, and its vectors ``(rows, D)`` at each layer.
Blocks: TypeAlias = Iterable[tuple[int, list[npt.NDArray[np.float32]]]]


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
                file.write(_safetensors_header([f"layer.{layer}" for layer in layers], (len(names), dim), metadata))
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
    with atomic_write(out) as temporary, parquet.ParquetWriter(temporary, schema, use_dictionary=False) as writer:
        for start, vectors in blocks:
            columns = [pa.FixedSizeListArray.from_arrays(rows.reshape(-1), dim) for rows in vectors]
            texts = pa.array(names[start : start + len(vectors[0])], pa.string())
            writer.write_table(pa.Table.from_arrays([texts, *columns], schema=schema))


def _safetensors_header(names: Sequence[str], shape: Sequence[int], metadata: Mapping[str, Any]) -> bytes:
    """Return the header of a file with float32 tensors of one shape."""
    table: dict[str, Any] = {"__metadata__": {"midlayer": json.dumps(metadata)}}
    size = 4 * math.prod(shape)
    for number, name in enumerate(names):
        table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [number * size, (number + 1) * size]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
