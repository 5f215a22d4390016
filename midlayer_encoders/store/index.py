"""Look up the shard and row of each text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from midlayer_encoders.store.shard import Shard

Places: TypeAlias = dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]
"""For each shard: positions among the requested keys, and their ascending rows in the shard."""


class Index:
    """A dictionary from keys to rows, which are numbered across all shards. It takes about 150 bytes per text.

    Attributes:
        shards: the metadata of each shard, by file name.
    """

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self._keys: dict[str, Sequence[bytes]] = {}
        self._starts: dict[str, int] = {}  # number of each shard's first row, increasing
        self._rows: dict[bytes, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def add(self, name: str, shard: Shard, keys: Sequence[bytes]) -> None:
        """Add a shard. A key that is also in an earlier shard is read from this one."""
        self.shards[name] = shard
        self._keys[name] = keys
        self._starts[name] = self._next
        self._next += shard.count
        self._rows.update(zip(keys, range(self._starts[name], self._next), strict=True))

    def remove(self, names: Iterable[str]) -> None:
        """Remove shards, and the keys that no other shard holds."""
        removed = list(names)
        for name in removed:
            del self.shards[name], self._keys[name], self._starts[name]
        if removed:
            self._rows.clear()
            for name, keys in self._keys.items():
                self._rows.update(zip(keys, range(self._starts[name], self._starts[name] + len(keys)), strict=True))

    def find(self, keys: Sequence[bytes]) -> npt.NDArray[np.intp]:
        """Return the row number of each key, -1 for a key that is not stored."""
        return np.fromiter((self._rows.get(key, -1) for key in keys), np.intp, len(keys))

    def places(self, rows: npt.NDArray[np.intp]) -> Places:
        """Return, for each shard that holds some of the rows, their positions in ``rows`` and their rows in it."""
        names = list(self._starts)
        starts = np.array(list(self._starts.values()), dtype=np.intp)
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        shards = np.searchsorted(starts, ascending, side="right") - 1
        bounds = [*np.flatnonzero(np.diff(shards, prepend=-1)), len(order)]
        return {
            names[shards[start]]: (order[start:end], ascending[start:end] - starts[shards[start]])
            for start, end in pairwise(bounds)
        }
