"""Read GGUF files: their fields, and their tensors as memory-mapped bytes."""

import hashlib
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from midlayer_encoders.errors import ModelNotFoundError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """A tensor of a file: its shape (rows first), the number of its type, and its bytes."""

    shape: tuple[int, ...]
    kind: int
    data: NDArray[np.uint8]

    def values(self) -> NDArray[np.float32]:
        """Return the values of the tensor in float32."""
        import gguf

        rows = self.data.reshape(*self.shape[:-1], -1)
        return np.require(gguf.dequantize(rows, gguf.GGMLQuantizationType(self.kind)), np.float32, ["C", "W"])


class GgufFile(NamedTuple):
    """A file: its metadata by name, its tensors by name, and the digest of all but the tensors' bytes."""

    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    digest: str


def read_gguf(path: Path) -> GgufFile:
    """Return the content of a GGUF file; the bytes of its tensors stay on disk.

    ``gguf.GGUFReader`` takes ten seconds for the 49,000 tokens of SmolLM2.

    Raises:
        ModelNotFoundError: if the file is damaged, or its header counts fewer tensors than it has.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
        fields, offset, num_tensors = _read_fields(data.data)
        return _with_tensors(data, fields, offset, num_tensors)
    except (ValueError, ArithmeticError, struct.error, KeyError, TypeError) as reason:
        raise ModelNotFoundError(
            f"`gguf_file` must be a GGUF file in little-endian order, but {path} cannot be read: {reason}."
        ) from reason


def _read_fields(data: memoryview) -> tuple[dict[str, Any], int, int]:
    """Return the fields, the offset after them and the number of tensors."""
    magic, version, num_tensors, num_fields = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it starts with {magic!r} and version {version}, not with b'GGUF' and version 2 or 3")
    fields: dict[str, Any] = {}
    offset = 24
    for _ in range(num_fields):
        name, offset = _read_value(data, offset, _STRING)
        if name in fields:
            raise ValueError(f"it has two fields {name!r}")
        (kind,) = struct.unpack_from("<I", data, offset)
        fields[name], offset = _read_value(data, offset + 4, kind)
    return fields, offset, num_tensors


def _read_value(data: memoryview, offset: int, kind: int) -> tuple[Any, int]:
    """Return the value of a kind at an offset, and the offset after it."""
    if kind == _STRING:
        (size,) = struct.unpack_from("<Q", data, offset)
        end = offset + 8 + size
        if end > len(data):
            raise ValueError("it is truncated")
        return str(data[offset + 8 : end], "utf8"), end
    if kind == _ARRAY:
        kind, count = struct.unpack_from("<IQ", data, offset)
        offset += 12
        if kind in _SCALARS:
            dtype = np.dtype(f"<{_SCALARS[kind]}")
            return np.frombuffer(data, dtype, count, offset).tolist(), offset + count * dtype.itemsize
        if kind == _ARRAY:
            raise ValueError("it has a list of lists")
        items = []
        for _ in range(count):
            item, offset = _read_value(data, offset, kind)
            items.append(item)
        return items, offset
    (value,) = struct.unpack_from(f"<{_SCALARS[kind]}", data, offset)
    return value, offset + struct.calcsize(f"<{_SCALARS[kind]}")


def _with_tensors(data: NDArray[np.uint8], fields: dict[str, Any], offset: int, num_tensors: int) -> GgufFile:
    """Return a file with its tensors, which must follow each other up to the end, as llama.cpp requires."""
    import gguf

    header = data.data
    places: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    alignment = int(fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
    end = 0
    for _ in range(num_tensors):
        name, offset = _read_value(header, offset, _STRING)
        (num_dimensions,) = struct.unpack_from("<I", header, offset)
        *sizes, kind, start = struct.unpack_from(f"<{num_dimensions}QIQ", header, offset + 4)
        offset += 4 + 8 * num_dimensions + 12
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if name in places or start != end or not sizes or sizes[0] % block:
            raise ValueError(f"the entry of its tensor {name!r} is invalid")
        size = math.prod(sizes) // block * block_bytes
        places[name] = tuple(reversed(sizes)), kind, start, size
        end = start + size + -size % alignment
    start_of_data = offset + -offset % alignment
    last = max((start + size for _, _, start, size in places.values()), default=0)
    if places and not start_of_data + last <= len(data) <= start_of_data + end:
        raise ValueError(
            f"it has {len(data):,} bytes, but its header lists {num_tensors} tensors that end at byte "
            f"{start_of_data + end:,}: it is truncated, or its header counts too few tensors. Download it again"
        )
    tensors = {
        name: GgufTensor(shape, kind, data[start_of_data + start : start_of_data + start + size])
        for name, (shape, kind, start, size) in places.items()
    }
    digest = hashlib.blake2b(data[:offset].data, digest_size=16)
    for name, tensor in tensors.items():
        if name.startswith("rope_"):  # the config holds them
            digest.update(tensor.data.data)
    return GgufFile(fields, tensors, digest.hexdigest())
