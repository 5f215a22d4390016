"""Truncated and quantized vectors, from stored ones: ``truncate_dim``, then mteb's ``CompressionWrapper``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt

from midlayer_encoders._types import Precision
from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_choice, check_count, check_list

_BITS: dict[Precision, int] = {"float32": 32, "int8": 8, "binary": 1}
_STEPS = np.float32(255)

_Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Compression:
    """How a vector is made smaller after all modules of an encoder.

    Attributes:
        dims: number of leading dimensions to keep; ``None`` for all. As in sentence-transformers, a ``Normalize``
            module comes before.
        precision: ``"int8"`` for 256 steps between the least and the greatest value of each dimension, ``"binary"`` for
            1 where a value is above 0, else 0.
    """

    dims: int | None = None
    precision: Precision = "float32"

    @property
    def label(self) -> str:
        """What differs from whole vectors of float32."""
        dims = [] if self.dims is None else [f"{self.dims} dims"]
        return ", ".join([*dims, *([self.precision] if self.precision != "float32" else [])])

    def apply(self, vectors: _Array, extremes: _Array | None = None) -> _Array:
        """Return truncated and quantized vectors ``(N, dims)`` as float32, with which mteb computes scores.

        Args:
            vectors: shape ``(N, D)``.
            extremes: least and greatest value of each dimension ``(2, dims)``, by default of ``vectors``. mteb
                takes them from the inputs of one call of ``encode``: of all queries, of all first sentences, ….
        """
        vectors = vectors[:, : self.dims]
        if self.precision == "binary":
            return (vectors > 0).astype(np.float32)
        if self.precision == "float32":
            return vectors
        lowest, highest = self.extremes(vectors) if extremes is None else extremes
        steps = (highest - lowest) / _STEPS
        quantized: _Array = np.floor((vectors - lowest) / np.where(steps == 0, 1, steps)) - 128
        return quantized

    def extremes(self, vectors: _Array) -> _Array:
        """Return the least and the greatest value of each dimension, shape ``(2, dims)``."""
        if len(vectors) < 2:
            raise OptionError(
                "`precisions` must not include 'int8' for this task, which embeds one text at a time: the steps are "
                "between the least and the greatest value of several. Use 'binary'."
            )
        vectors = vectors[:, : self.dims]
        return np.stack([vectors.min(axis=0), vectors.max(axis=0)])


def make_compressions(dims: Any, precisions: Any) -> tuple[Compression, ...]:
    """Return each number of dimensions with each precision; whole vectors and float32 are always among them.

    Example:
        >>> [each.label for each in make_compressions([64], ["int8"])]
        ['', 'int8', '64 dims', '64 dims, int8']
    """
    sizes = [check_count("dims", size, "dimensions") for size in check_list("dims", dims, "numbers", minimum=0)]
    names = [
        cast(Precision, check_choice("precisions", name, get_args(Precision)))
        for name in check_list("precisions", precisions, "names", minimum=0)
    ]
    pairs = ((size, name) for size in (None, *sorted(sizes, reverse=True)) for name in ("float32", *names))
    return tuple(Compression(size, name) for size, name in dict.fromkeys(pairs))


def vector_bytes(dims: int, precision: Precision = "float32") -> int:
    """Return the size of a vector; eight numbers of a binary one share a byte.

    Example:
        >>> vector_bytes(384), vector_bytes(64, "int8"), vector_bytes(100, "binary")
        (1536, 64, 13)
    """
    return -(-dims * _BITS[precision] // 8)


@dataclass
class CompressedRows:
    """The vectors of a task's rows, compressed as mteb does in each of its calls of ``encode``.

    Attributes:
        read: returns stored vectors of keys at a layer.
        calls: keys of the inputs of each call.
        compression: how to compress.
    """

    read: Callable[[int, Sequence[str]], _Array]
    calls: Sequence[Sequence[str]]
    compression: Compression
    _extremes: dict[tuple[int, int], _Array] = field(default_factory=dict)

    @staticmethod
    def keys(call: int, keys: Sequence[str]) -> list[str]:
        """Return keys that name their call, so that the same text in two calls is two rows."""
        return [f"{call} {key}" for key in keys]

    def read_rows(self, layer: int, names: Sequence[str]) -> _Array:
        """Return the compressed vectors of keys that name their call, shape ``(N, dims)``."""
        calls, keys = zip(*(name.split(" ", 1) for name in names), strict=True)
        vectors = self.read(layer, keys)
        if self.compression.precision != "int8":
            return self.compression.apply(vectors)
        numbers = np.array(calls, dtype=np.int64)
        rows = np.empty_like(vectors[:, : self.compression.dims])
        for call in np.unique(numbers).tolist():
            if (layer, call) not in self._extremes:
                self._extremes[layer, call] = self.compression.extremes(self.read(layer, self.calls[call]))
            rows[numbers == call] = self.compression.apply(vectors[numbers == call], self._extremes[layer, call])
        return rows
