"""Store the embeddings of all layers on disk, written once and read one layer at a time.

A store is a folder of shards. A shard is an immutable safetensors file with the keys of its texts ``(N, 16)``, the rows
``(N, D)`` of each layer, and in its metadata a CRC-32 of each layer's rows and one of the keys and the other metadata.
It is complete or absent, so processes share a store without locks: each writes its own shards and reads the others'.
"""

import hashlib
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from midlayer_encoders import files
from midlayer_encoders.errors import DiskFullError, LayerIndexError, MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.validation import check_choice

__all__ = ["DiskFullError", "EmbeddingStore", "StoreDtype", "StoreError", "TextNotStoredError", "text_key"]

StoreDtype: TypeAlias = Literal["float16", "float32"]

_Rows: TypeAlias = npt.NDArray[np.intp]

_FORMAT = "midlayer embeddings 1"
_DTYPES = {"F16": "float16", "F32": "float32"}  # in safetensors and in NumPy
_KEY_BYTES = 16
_THREADS = min(8, os.cpu_count() or 1)  # for checksums and copies


class StoreError(MidlayerError):
    """A store cannot be used."""


class TextNotStoredError(StoreError, LookupError):
    """A text was never stored, or its shard was damaged and set aside."""


class _DamagedError(StoreError):
    """The content of a shard differs from what was written. Only the store handles this error."""


def text_key(text: str, prompt: str = "") -> str:
    """Return the key of a text under a prompt: 32 hexadecimal digits that depend on their content.

    Example:
        >>> text_key("a text")
        'c4aabe4e591eb06a7b3fffecb22ef9d3'
        >>> text_key("a text", prompt="query: ") == text_key("query: a text")
        False
    """
    # The prompt's length distinguishes ("ab", "c") from ("a", "bc"); a lone surrogate is a legal str.
    content = f"{len(prompt)}:{prompt}{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).hexdigest()


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
            "format": _FORMAT,
            "store": self.store,
            "layers": json.dumps(self.layers),
            "checksums": " ".join(f"{checksum:08x}" for checksum in self.checksums),
        }
        head = json.dumps([fields, self.count, self.dim, self.dtype]).encode()
        return {**fields, "checksum": f"{zlib.crc32(keys, zlib.crc32(head)):08x}"}

    def read(self, layer: int, rows: slice) -> npt.NDArray[Any]:
        """Return consecutive rows of a layer."""
        with _open_shard(self.path) as file:
            vectors = file.get_slice(f"layer.{layer}")
            if vectors.get_shape() != [self.count, self.dim]:
                raise _DamagedError("its shape has changed")
            found: npt.NDArray[Any] = vectors[rows]
            return found

    def verify(self, layer: int) -> None:
        """Verify the checksum of a layer's rows."""
        if zlib.crc32(self.read(layer, slice(None)).data) != self.checksums[self.layers.index(layer)]:
            raise _DamagedError(f"the rows of layer {layer} do not match their checksum")


@contextmanager
def _open_shard(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, StoreError):
        raise
    except Exception as error:
        raise _DamagedError(f"it is not a complete safetensors file of a store: {error}") from error


def read_head(path: Path) -> tuple[Shard, list[bytes]]:
    """Return a shard and its keys after verifying their checksum and the file's length."""
    if path.is_symlink() and not path.exists():
        raise _DamagedError("it is a dangling link")
    if not stat.S_ISREG(path.stat().st_mode):  # reading a FIFO would never end
        raise _DamagedError("it is not a regular file")
    with _open_shard(path) as file:
        metadata = file.metadata()
        layers = tuple(json.loads(metadata["layers"]))
        first = file.get_slice(f"layer.{layers[0]}")
        count, dim = first.get_shape()
        checksums = tuple(int(checksum, 16) for checksum in metadata["checksums"].split())
        shard = Shard(path, metadata["store"], layers, count, dim, _DTYPES[first.get_dtype()], checksums)
        keys = file.get_tensor("keys").tobytes()
        complete = set(file.keys()) == {"keys", *(f"layer.{layer}" for layer in layers)}
    if not complete or metadata != shard.metadata(keys):
        raise _DamagedError("its metadata or keys do not match their checksum")
    return shard, [keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)]


def _write_shard(
    path: Path, store: str, layers: tuple[int, ...], keys: Iterable[bytes], rows: npt.NDArray[Any]
) -> Shard:
    """Write the embeddings ``(L, N, D)`` of texts and return their shard."""
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = tuple(pool.map(zlib.crc32, rows))
    _, count, dim = rows.shape
    shard = Shard(path, store, layers, count, dim, rows.dtype.name, checksums)
    joined = b"".join(keys)
    tensors = {f"layer.{layer}": vectors for layer, vectors in zip(layers, rows, strict=True)}
    tensors["keys"] = np.frombuffer(joined, dtype=np.uint8).reshape(-1, _KEY_BYTES)
    with files.atomic_write(path) as temporary:
        save_file(tensors, temporary, shard.metadata(joined))
    return shard


class EmbeddingStore:
    """The embeddings of texts at some layers of one encoder, in a folder.

    Any number of processes may read and write at the same time, each with its own object. An object keeps no file open
    between calls, so it needs no closing and can be pickled.

    Args:
        root: folder of stores; this one is in ``root / key``.
        key: digest of everything that changes a vector except the layer and the text.
        layers: layers of every embedding. Texts stored with more layers are used, texts stored with fewer are not.
        dim: number D of dimensions.
        dtype: on disk; ``"float16"`` takes half the space, with a relative error of ``2 ** -11`` above ``6e-5``.
        description: a readable description of the key.

    Example:
        >>> import tempfile
        >>> root = tempfile.TemporaryDirectory()
        >>> store = EmbeddingStore(root.name, key="e1f5", layers=[0, 1], dim=3)
        >>> keys = [text_key("a text"), text_key("another")]
        >>> store.write(keys, np.arange(12.0).reshape(2, 2, 3))
        >>> store.read(1, keys[::-1])
        array([[ 9., 10., 11.],
               [ 6.,  7.,  8.]], dtype=float32)
        >>> store.missing([*keys, text_key("a third")])
        [2]
        >>> root.cleanup()
    """

    def __init__(
        self,
        root: Path | str,
        *,
        key: str,
        layers: Sequence[int],
        dim: int,
        dtype: StoreDtype = "float32",
        description: Mapping[str, object] | None = None,
    ) -> None:
        check_choice("dtype", dtype, ("float16", "float32"))
        if not key.replace("-", "").replace("_", "").isalnum():
            raise OptionError(f"`key` must be letters, digits, '-' and '_', since it names a folder, but got {key!r}.")
        if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0:
            raise OptionError(f"`layers` must be increasing layers from 0, at least one, but got {list(layers)}.")
        if dim < 1:
            raise OptionError(f"`dim` must be at least 1, but got {dim}.")
        self.folder = Path(root).expanduser() / key
        self.key = key
        self.layers = tuple(map(int, layers))
        self.dim = int(dim)
        self.dtype = dtype
        self._shards: dict[str, Shard] = {}
        self._rows: dict[str, int] = {}  # rows are numbered across all shards
        self._ignored: set[str] = set()  # shards that lack a layer or are damaged
        self._verified: set[tuple[Any, ...]] = set()  # stamps of shards, and layers whose checksum matched then
        files.make_folder(self.folder)
        path = self.folder / "store.json"
        expected = {"format": _FORMAT, "dim": self.dim, "dtype": self.dtype}
        if files.read_artifact(path, read_label) is None:
            files.write_file(path, json.dumps({**expected, "description": description}, indent=2, default=str).encode())
        label = read_label(path)
        for name, value in expected.items():
            if label[name] != value:
                raise OptionError(
                    f"`{name}` must be {label[name]!r} for the store in {self.folder}, but got {value!r}: "
                    "pass that, choose another `key` or `root`, or remove the folder."
                )
        files.remove_leftovers(self.folder)
        self.refresh()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __repr__(self) -> str:
        return f"EmbeddingStore({str(self.folder)!r}, {len(self)} texts x {len(self.layers)} layers x {self.dim})"

    def refresh(self) -> None:
        """Read which shards other processes have written or removed."""
        while True:
            names = {path.name for path in self.folder.glob("*.safetensors")} - self._ignored
            if self._shards.keys() - names:  # an earlier shard may hold some of the texts that were removed
                self._shards = {}
                self._rows = {}
            with suppress(FileNotFoundError):  # removed since it was listed
                for name in sorted(names - self._shards.keys()):
                    self._add(self.folder / name)
                return

    def _add(self, path: Path) -> None:
        try:
            shard, keys = read_head(path)
            if (shard.store, shard.dim, shard.dtype) != (self.key, self.dim, self.dtype):
                raise _DamagedError(f"it belongs to the store {shard.store!r}")
        except _DamagedError as error:
            self._discard(path, error)
            return
        if set(self.layers) <= set(shard.layers):
            self._add_rows(shard, [key.hex() for key in keys])
        else:
            self._ignored.add(path.name)

    def _add_rows(self, shard: Shard, keys: Iterable[str]) -> None:
        """Index a shard; a text that is also in an earlier shard is read from this one."""
        first = sum(shard.count for shard in self._shards.values())
        self._shards[shard.path.name] = shard
        self._rows.update(zip(keys, range(first, first + shard.count), strict=True))

    def _find(self, keys: Sequence[str]) -> _Rows:
        """Return the row number of each key, -1 for a key that is not stored."""
        return np.fromiter((self._rows.get(key, -1) for key in keys), np.intp, len(keys))

    def _places(self, rows: _Rows) -> list[tuple[Shard, _Rows, _Rows]]:
        """Return each shard of the rows, their positions in ``rows`` and their ascending rows in the shard."""
        shards = list(self._shards.values())
        first_rows = np.cumsum([0, *(shard.count for shard in shards)])
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        numbers = np.searchsorted(first_rows, ascending, side="right") - 1
        bounds = [*np.flatnonzero(np.diff(numbers, prepend=-1)), len(order)]
        return [
            (shards[numbers[start]], order[start:end], ascending[start:end] - first_rows[numbers[start]])
            for start, end in pairwise(bounds)
        ]

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the keys that are not stored, each key once.

        All other keys can be read at every layer: the checksums of their shards are verified, once per shard and
        object, and again if a shard's file has changed.
        """
        while True:
            self.refresh()
            rows = self._find(keys)
            with suppress(FileNotFoundError):
                _run_in_threads(lambda place: self._verify(place[0], self.layers), self._places(rows[rows >= 0]))
                absent = np.flatnonzero(rows < 0).tolist()
                return sorted({_key_bytes(keys[position]): position for position in reversed(absent)}.values())

    def read(self, layer: int, keys: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the embeddings of texts at a layer, in the order of ``keys``, shape ``(N, D)``."""
        if layer not in self.layers:
            raise LayerIndexError(
                f"`layer` must be one of the stored layers {', '.join(map(str, self.layers))}, but got {layer}: open "
                f"the store in {self.folder} with `layers` that include it, and write the texts that are then missing."
            )
        embeddings = np.empty((len(keys), self.dim), dtype=np.float32)

        def read(place: tuple[Shard, _Rows, _Rows]) -> None:
            shard, positions, rows = place
            self._verify(shard, [layer])
            with self._discarding(shard):
                vectors = shard.read(layer, slice(rows[0], rows[-1] + 1))
            is_whole = np.array_equal(rows, np.arange(rows[0], rows[-1] + 1))
            embeddings[positions] = vectors if is_whole else vectors[rows - rows[0]]

        while True:
            rows = self._find(keys)
            if (rows < 0).any():
                self.refresh()
                rows = self._find(keys)
            absent = np.flatnonzero(rows < 0)
            if len(absent):
                _key_bytes(keys[absent[0]])  # raises if it is not a key at all
                raise TextNotStoredError(
                    f"`keys` must be stored in {self.folder}, but {len(absent)} of {len(rows)} are not, the first "
                    f"`keys[{absent[0]}]` ({keys[absent[0]]}): embed and write those that `missing(keys)` lists."
                )
            with suppress(FileNotFoundError):
                _run_in_threads(read, self._places(rows))
                return embeddings
            self.refresh()

    def _verify(self, shard: Shard, layers: Iterable[int]) -> None:
        """Verify the checksums of a shard's layers, once per object and again if the file has changed."""
        stamp = _stamp(shard.path)
        for layer in layers:
            if (*stamp, layer) not in self._verified:
                with self._discarding(shard):
                    shard.verify(layer)
                self._verified.add((*stamp, layer))

    @contextmanager
    def _discarding(self, shard: Shard) -> Iterator[None]:
        """Set a damaged shard aside, and raise the error of a shard that was removed."""
        try:
            yield
        except _DamagedError as error:
            self._discard(shard.path, error)
            raise FileNotFoundError(shard.path) from error

    def _discard(self, path: Path, error: _DamagedError) -> None:
        """Set a damaged shard aside, so that its texts are embedded again."""
        self._ignored.add(path.name)
        files.set_aside(path, str(error))

    def write(self, keys: Sequence[str], embeddings: npt.NDArray[Any], *, finite: bool = False) -> None:
        """Store the embeddings of texts at all layers: all of them, or none if the process is killed.

        Texts that are already stored stay unchanged.

        Args:
            keys: N keys.
            embeddings: shape ``(L, N, D)``, finite in the store's dtype.
            finite: the caller has verified that they are finite, so only rounded values are checked.
        """
        rows = np.asarray(embeddings)
        expected = (len(self.layers), len(keys), self.dim)
        if rows.shape != expected:
            raise OptionError(
                f"`embeddings` must have the shape {expected} (layers, keys, dimensions), but got {rows.shape}."
            )
        new = {key: row for row, key in enumerate(keys) if key not in self._rows}
        if not new:
            return
        if len(new) < len(keys):
            rows = rows[:, list(new.values())]
        if not finite or rows.dtype != self.dtype:
            rows = self._round(rows)
        # Shards are added in the order of their names: if a text is stored twice, the later one counts.
        path = self.folder / f"{time.time_ns():020d}-{uuid4().hex[:8]}.safetensors"
        if not self.folder.exists():
            raise StoreError(f"The store in {self.folder} was removed while it was in use: run again.")
        shard = _write_shard(path, self.key, self.layers, map(_key_bytes, new), np.ascontiguousarray(rows))
        self._add_rows(shard, new)
        self._verified.update((*_stamp(path), layer) for layer in self.layers)

    def _round(self, embeddings: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):  # checked below
            rounded = embeddings.astype(self.dtype, copy=False)
        if not np.isfinite(rounded).all():
            position, row, _ = np.argwhere(~np.isfinite(rounded))[0]
            is_large = np.isfinite(embeddings[position, row]).all()
            large = f"too large for {self.dtype}: use `dtype='float32'`"
            problem = large if is_large else "NaN or infinite: check that text, and the dtype of the model"
            raise NotFiniteError(
                f"`embeddings` must be finite, but row {row} at layer {self.layers[position]} is {problem}."
            )
        return rounded


def _stamp(path: Path) -> tuple[object, ...]:
    """Return what differs after a file was written to or replaced."""
    status = path.stat()
    return path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_label(path: Path) -> dict[str, Any]:
    """Return the content of a ``store.json``, or raise a ``ValueError`` if it does not describe a store."""
    label = json.loads(path.read_bytes())
    if not isinstance(label, dict) or not {"format", "dim", "dtype"} <= label.keys():
        raise ValueError("it does not describe a store")
    return label


def _run_in_threads(function: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Call a function with each item, in several threads, and raise the first error after all have finished."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="midlayer-store") as pool:
        list(pool.map(function, items))


def _key_bytes(key: str) -> bytes:
    try:
        content = bytes.fromhex(key)
    except (ValueError, TypeError):
        content = b""
    if len(content) != _KEY_BYTES or content.hex() != key:
        raise OptionError(
            f"A key must be {2 * _KEY_BYTES} lowercase hexadecimal digits, but got {key!r}: use `text_key(text)`."
        )
    return content
