"""Where each text's row is: the shards that are known, and their rows numbered through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from midlayer_encoders.store.shard import KEY_BYTES, Shard

__all__ = ["Index", "Places"]

Places: TypeAlias = dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]
"""By shard: places among the keys asked for, and their rows in the shard."""

_FEW = 2048  # keys that are looked up one by one


class Index:
    """A dictionary from keys to rows of shards. About 150 bytes a text.

    Attributes:
        shards: what the head of each shard says, by its file's name.
        version: another number whenever a key may be elsewhere.
    """

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._firsts: dict[str, int] = {}  # number of each shard's first row, increasing
        self._numbers: dict[bytes, int] = {}  # number of each key's row
        self._next = 0
        self._table: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]] | None = None
        self.version = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def add(self, name: str, shard: Shard, keys: Sequence[bytes]) -> None:
        """Take in a shard. A key that another shard has too is from now on read from this one."""
        self.shards[name] = shard
        self._keys[name] = list(keys)
        self._firsts[name] = self._next
        self._next += shard.count
        self._number(name)

    def _number(self, name: str) -> None:
        self._table = None
        self.version += 1
        self._numbers.update(zip(self._keys[name], self._rows(name), strict=True))

    def forget(self, names: Iterable[str]) -> None:
        """Leave out shards, and the keys that are in no other."""
        gone = list(names)
        for name in gone:
            del self.shards[name], self._keys[name], self._firsts[name]
        if gone:
            self._numbers.clear()
            self._table = None
            self.version += 1
            for name in self.shards:
                self._number(name)

    def keys_in(self, names: Iterable[str]) -> list[bytes]:
        """Return the keys that are read from these shards."""
        rows = ((key, row) for name in names for key, row in zip(self._keys[name], self._rows(name), strict=True))
        return [key for key, row in rows if self._numbers[key] == row]

    def _rows(self, name: str) -> range:
        return range(self._firsts[name], self._firsts[name] + self.shards[name].count)

    def find(self, keys: bytes) -> npt.NDArray[np.int64]:
        """Return the number of the row of each key, -1 for those in no shard. The keys follow one another."""
        count = len(keys) // KEY_BYTES
        if count <= _FEW:
            each = (keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES))
            return np.fromiter((self._numbers.get(key, -1) for key in each), np.int64, count)
        if self._table is None:
            self._table = self._sorted()
        heads, tails, numbers = self._table
        found = np.full(count, -1, dtype=np.int64)
        if not len(heads):
            return found
        wanted = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
        order = np.argsort(wanted[:, 0])  # from front to back, which is faster than to and fro
        head, tail = wanted[order, 0], wanted[order, 1]
        place = np.searchsorted(heads, head)
        # Almost never do two keys have the same first half: then the second one is the place after.
        while len(order):
            inside = place < len(heads)
            inside[inside] = heads[place[inside]] == head[inside]
            hit = inside.copy()
            hit[inside] = tails[place[inside]] == tail[inside]
            found[order[hit]] = numbers[place[hit]]
            on = inside & ~hit
            order, head, tail, place = order[on], head[on], tail[on], place[on] + 1
        return found

    def _sorted(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the first and second halves of all keys, in the order of the first, and their rows."""
        halves = np.frombuffer(b"".join(self._numbers), dtype=np.uint64).reshape(-1, 2)
        order = np.argsort(halves[:, 0])
        numbers = np.fromiter(self._numbers.values(), np.int64, len(self._numbers))
        return halves[order, 0], halves[order, 1], numbers[order]

    def places(self, numbers: npt.NDArray[np.int64]) -> Places:
        """Return, for each shard that holds some of the rows, their places in ``numbers`` and their rows in it."""
        names, firsts = list(self._firsts), np.array(list(self._firsts.values()), dtype=np.intp)
        order = np.argsort(numbers, kind="stable")  # each shard from front to back
        ascending = numbers[order]
        shards = np.searchsorted(firsts, ascending, side="right") - 1
        starts = np.flatnonzero(np.diff(shards, prepend=-1))
        groups = zip(starts, [*starts[1:], len(order)], strict=True) if len(order) else ()
        return {
            names[shards[start]]: (order[start:end], ascending[start:end] - firsts[shards[start]])
            for start, end in groups
        }
