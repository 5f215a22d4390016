"""The store that a sweep writes and reads: a folder of shards, and an index rebuilt from them.

A shard is whole or not there and never changes, so processes need no lock to share a store: each writes shards of its
own and takes note of the others'.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import DiskFullError, LayerIndexError, NotFiniteError, OptionError
from midlayer_encoders.files import clear_left, lock, make_folder, set_aside, write_file
from midlayer_encoders.store.index import Index, Places
from midlayer_encoders.store.shard import (
    DTYPES,
    FORMAT,
    KEY_BYTES,
    DamagedError,
    Shard,
    StoreError,
    TextNotStoredError,
    map_rows,
    read_head,
    write_shard,
)
from midlayer_encoders.validation import check_choice

__all__ = ["EmbeddingStore", "StoreDtype", "read_label", "text_key"]

StoreDtype: TypeAlias = Literal["float16", "float32"]

_TIER = 64  # this many shards of about one size become one
_LARGE = 4 * 2**20  # bytes of a shard that is left as it is: larger ones are no faster to read (benchmarks/results)
_MERGED = 512 * 2**20  # bytes of a merged shard, about

_THREADS = min(8, os.cpu_count() or 1)  # that compare checksums, and copy rows
_NOTHING_ASKED: tuple[bytes, int, Places] = (b"", -1, {})

_discarding = threading.Lock()
_log = logging.getLogger(__name__)


def text_key(text: str, prompt: str = "") -> str:
    """Return the key of a text under a prompt: 32 hexadecimal digits made of their content.

    Example:
        >>> text_key("a text")
        'c4aabe4e591eb06a7b3fffecb22ef9d3'
        >>> text_key("a text", prompt="query: ") == text_key("query: a text")
        False
    """
    # The prompt's length keeps ("ab", "c") and ("a", "bc") apart; half a surrogate pair is a legal str.
    content = f"{len(prompt)}:{prompt}{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=KEY_BYTES).hexdigest()


class EmbeddingStore:
    """The embeddings of texts at some layers of one encoder, kept in a folder.

    Any number of processes may read, write and merge at the same time, with an object each. An object keeps no file
    open between calls: it need not be closed, and can be pickled.

    Args:
        root: folder of stores; this one lies in ``root / key``.
        key: digest of everything that changes a vector except the layer and the text.
        layers: layers of every embedding. What was stored with more layers is used, what was stored with fewer is not.
        dim: number D of dimensions.
        dtype: on disk; ``"float16"`` takes half the room, at a relative error of ``2 ** -11`` above ``6e-5``.
        description: what the key stands for, to be read by people.

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
        check_choice("dtype", dtype, DTYPES)
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
        self._index = Index()
        self._ignored: set[str] = set()  # shards that lack a layer
        self._checked: dict[str, set[int]] = defaultdict(set)  # layers of each shard whose checksum was right
        self._asked = _NOTHING_ASKED
        self._open(description or {})

    def _open(self, description: Mapping[str, object]) -> None:
        make_folder(self.folder)
        label = self.folder / "store.json"
        ours = {"format": FORMAT, "dim": self.dim, "dtype": self.dtype}
        if read_label(label) is None:
            if label.is_file():
                set_aside(label, "it is no label of a store")
            write_file(label, json.dumps({**ours, "description": dict(description)}, indent=2, default=str).encode())
        found = read_label(label) or {}
        for name, value in ours.items():
            if found.get(name) != value:
                raise OptionError(
                    f"`{name}` must be {found.get(name)!r} for the store in {self.folder}, but got {value!r}: "
                    "pass that, choose another `key` or `root`, or remove the folder."
                )
        with suppress(OSError):  # on a disk that is read-only, no matter
            os.utime(label, follow_symlinks=False)  # the time of last use
        clear_left(self.folder)
        self.refresh()

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: str) -> bool:
        return _key_bytes(key) in self._index

    def __repr__(self) -> str:
        return f"EmbeddingStore({str(self.folder)!r}, {len(self)} texts x {len(self.layers)} layers x {self.dim})"

    def refresh(self) -> None:
        """Take note of what other processes have written, merged and removed since."""
        while True:
            names = self._listed()
            try:
                for name in sorted(names - self._index.shards.keys() - self._ignored):
                    self._take_in(name)
            except FileNotFoundError:
                continue  # merged by another process since it was listed
            self._index.forget(self._index.shards.keys() - names)
            return

    def _listed(self) -> set[str]:
        """Return the names of the shards, listed twice alike: one listing may miss what moves while it is made."""
        names: set[str] | None = None
        while names != (names := {path.name for path in self.folder.glob("*.safetensors")}):
            pass
        return names

    def _take_in(self, name: str) -> None:
        path = self.folder / name
        try:
            shard, keys = read_head(path)
        except DamagedError as damage:
            self._discard(name, damage)
            return
        except OSError:
            if not path.is_symlink():
                raise
            self._discard(name, DamagedError("it is a link that leads nowhere"))
            return
        if (shard.store, shard.dim, shard.dtype) != (self.key, self.dim, self.dtype):
            raise StoreError(
                f"{path} must hold {self.dtype} vectors of {self.dim} dimensions of the store {self.key!r}, but holds "
                f"{shard.dtype} vectors of {shard.dim} dimensions of {shard.store!r}: move it away."
            )
        if set(self.layers) <= set(shard.layers):
            self._index.add(name, shard, keys)
        else:
            self._ignored.add(name)

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of the keys that are not stored, each key once.

        Whatever is not listed can be read at every layer: the checksums of the shards that hold it are compared, once
        for each shard and object.
        """
        wanted = _joined(keys)
        while True:
            self.refresh()
            numbers = self._index.find(wanted)
            unchecked = [
                (name, layer)
                for name in self._index.places(numbers[numbers >= 0])
                for layer in set(self.layers) - self._checked[name]
            ]
            try:
                _in_threads(lambda one: self._map(*one), unchecked)
                break
            except FileNotFoundError:
                continue
        lacking = np.flatnonzero(numbers < 0).tolist()
        first = {wanted[KEY_BYTES * index : KEY_BYTES * (index + 1)]: index for index in reversed(lacking)}
        return sorted(first.values())

    def read(self, layer: int, keys: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the embeddings of texts at a layer, in the order asked, shape ``(N, D)``."""
        if layer not in self.layers:
            raise LayerIndexError(
                f"`layer` must be one of the stored layers {', '.join(map(str, self.layers))}, but got {layer}: open "
                f"the store in {self.folder} with `layers` that include it, and write what is then missing."
            )
        wanted = _joined(keys)
        embeddings = np.empty((len(keys), self.dim), dtype=np.float32)

        def read(one: tuple[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]) -> None:
            name, (places, rows) = one
            mapped = self._map(name, layer)
            whole = rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all()
            embeddings[places] = mapped[rows[0] : rows[-1] + 1] if whole else mapped[rows]

        while True:
            try:
                _in_threads(read, self._places(wanted).items())
                return embeddings
            except FileNotFoundError:
                self.refresh()

    def _places(self, wanted: bytes) -> Places:
        """Return where the rows of keys are, all of which must be stored: of the keys asked for last, from memory."""
        kept, version, places = self._asked
        if version == self._index.version and kept == wanted:
            return places
        numbers = self._index.find(wanted)
        if (numbers < 0).any():
            self.refresh()
            numbers = self._index.find(wanted)
        lacking = np.flatnonzero(numbers < 0)
        if len(lacking):
            key = wanted[KEY_BYTES * lacking[0] : KEY_BYTES * (lacking[0] + 1)].hex()
            raise TextNotStoredError(
                f"`keys` must be stored in {self.folder}, but {len(lacking)} of {len(numbers)} are not, the first "
                f"`keys[{lacking[0]}]` ({key}): embed and write those that `missing(keys)` lists."
            )
        places = self._index.places(numbers)
        self._asked = (wanted, self._index.version, places)
        return places

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: not what was asked for last."""
        return {**vars(self), "_asked": _NOTHING_ASKED}

    def _map(self, name: str, layer: int, *, again: bool = False) -> npt.NDArray[Any]:
        """Return a shard's rows at a layer, mapped; their checksum is compared the first time, or ``again``.

        Raises:
            FileNotFoundError: another process has merged the shard, or it was damaged and is now set aside.
        """
        path = self.folder / name
        try:
            rows = map_rows(path, self._index.shards[name], layer, check=again or layer not in self._checked[name])
        except DamagedError as damage:
            self._discard(name, damage)
            raise FileNotFoundError(path) from damage
        self._checked[name].add(layer)
        return rows

    def _discard(self, name: str, damage: DamagedError) -> None:
        """Set a damaged shard aside: its texts will be embedded again."""
        with _discarding:
            self._ignored.add(name)
            self._index.forget({name} & self._index.shards.keys())
        set_aside(self.folder / name, f"{damage}")

    def write(self, keys: Sequence[str], embeddings: npt.NDArray[Any], *, finite: bool = False) -> None:
        """Store the embeddings of texts at all layers: all of the texts or, if the process is killed, none.

        Texts that are stored already are left as they are.

        Args:
            keys: N keys.
            embeddings: shape ``(L, N, D)``, finite, and still so in the store's dtype.
            finite: whether they are known to be finite as they are, so that what is not rounded is not looked at.
        """
        embeddings = np.asarray(embeddings)
        expected = (len(self.layers), len(keys), self.dim)
        if embeddings.shape != expected:
            raise OptionError(
                f"`embeddings` must have the shape {expected} (layers, keys, dimensions), but got {embeddings.shape}."
            )
        new = {key: row for row, key in enumerate(map(_key_bytes, keys)) if key not in self._index}
        if not new:
            return
        rows = embeddings if len(new) == len(keys) else embeddings[:, list(new.values())]
        if not finite or rows.dtype != self.dtype:
            rows = self._rounded(rows)
        self._write_shard(list(new), ([of_layer] for of_layer in rows))
        if self._groups(_TIER):
            try:
                self.merge(least=_TIER)
            except DiskFullError as error:  # what was to be written is written
                _log.warning("Small shards were not merged. %s", error)

    def _rounded(self, embeddings: npt.NDArray[Any]) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):  # looked for below
            rounded = embeddings.astype(self.dtype, copy=False)
        if not np.isfinite(rounded).all():
            place, row, _ = np.argwhere(~np.isfinite(rounded))[0]
            if np.isfinite(embeddings[place, row]).all():
                what = f"too large for {self.dtype}: use `dtype='float32'`"
            else:
                what = "NaN or infinite: look at that text, and at the dtype that the model runs in"
            raise NotFiniteError(f"`embeddings` must be finite, but row {row} at layer {self.layers[place]} is {what}.")
        return rounded

    def _write_shard(self, keys: Sequence[bytes], rows: Iterable[Iterable[npt.NDArray[Any]]]) -> None:
        # Shards are taken in by name: of a text stored twice, as a killed merge leaves it, the later one counts.
        name = f"{time.time_ns():020d}-{uuid4().hex[:8]}.safetensors"
        shard = Shard(self.key, self.layers, len(keys), self.dim, self.dtype, ())
        if not self.folder.exists():
            raise StoreError(f"The store in {self.folder} was removed while it was in use: run again.")
        shard = write_shard(self.folder / name, shard, keys, rows)
        self._index.add(name, shard, keys)
        self._checked[name].update(self.layers)

    def merge(self, *, least: int = 2) -> None:
        """Make one shard of small shards of about one size, where there are ``least`` or more.

        :meth:`write` does so when there are many. Nothing is lost if the process is killed, or the disk gets full.
        """
        with lock(self.folder / "merge.lock") as held:
            if not held:
                return  # another process is at it
            self.refresh()
            for names in self._groups(least):
                try:
                    self._merge(names)
                except FileNotFoundError:
                    continue  # damaged, or merged on a disk without locks: what is left is as good
            self.refresh()

    def _groups(self, least: int) -> list[list[str]]:
        """Return the names of the shards to make one of."""
        groups: dict[tuple[int, int], list[str]] = defaultdict(list)
        total: dict[int, int] = defaultdict(int)
        for name, shard in self._index.shards.items():
            if shard.layers == self.layers and shard.size < _LARGE:
                tier = int(math.log(shard.size, _TIER))
                groups[tier, total[tier] // _MERGED].append(name)
                total[tier] += shard.size
        return [names for names in groups.values() if len(names) >= least]

    def _merge(self, names: Sequence[str]) -> None:
        # A text that is in another shard too, with these layers or more, is left out if the index points there.
        keys = self._index.keys_in(names)
        sources = self._index.places(self._index.find(b"".join(keys)))

        def blocks(layer: int) -> Iterator[npt.NDArray[Any]]:
            for name, (_, rows) in sources.items():
                yield self._map(name, layer, again=True)[rows]

        if keys:
            in_order = [keys[place] for places, _ in sources.values() for place in places]
            self._write_shard(in_order, map(blocks, self.layers))
        for name in names:
            with suppress(OSError):  # Windows keeps a file that is being read; a later merge removes it
                (self.folder / name).unlink(missing_ok=True)


def read_label(path: Path) -> dict[str, Any] | None:
    """Return what a store's ``store.json`` says, or None where there is none that can be read."""
    if not path.is_file():  # a FIFO would never end
        return None
    try:
        label = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return label if isinstance(label, dict) and {"format", "dim", "dtype"} <= label.keys() else None


def _in_threads(call: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Call with each item, in several threads where that helps; the first error is raised when all have ended."""
    several = list(items)
    if len(several) < 2 or _THREADS < 2:
        for item in several:
            call(item)
        return
    with ThreadPoolExecutor(min(_THREADS, len(several)), thread_name_prefix="midlayer-store") as pool:
        for future in [pool.submit(call, item) for item in several]:
            future.result()


def _joined(keys: Sequence[str]) -> bytes:
    """Return the bytes of keys, one after another."""
    with suppress(ValueError, TypeError):
        if set(map(len, keys)) <= {2 * KEY_BYTES}:  # digits of one key must not be taken for another's
            written = bytes.fromhex("".join(keys))
            if len(written) == KEY_BYTES * len(keys):
                return written
    return b"".join(map(_key_bytes, keys))  # which names the wrong one


def _key_bytes(key: str) -> bytes:
    try:
        written = bytes.fromhex(key)
    except (ValueError, TypeError):
        written = b""
    if len(written) != KEY_BYTES:
        raise OptionError(f"A key must be {2 * KEY_BYTES} hexadecimal digits, but got {key!r}: use `text_key(text)`.")
    return written
