"""Where each text's row is: the shards that are known, and their rows numbered through all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from midlayer_encoders.store.shard import Shard

__all__ = ["Index"]


class Index:
    """A dictionary from keys to rows of shards. About 150 bytes a text.

    Attributes:
        shards: what the head of each shard says, by its file's name.
    """

    def __init__(self) -> None:
        self.shards: dict[str, Shard] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._firsts: dict[str, int] = {}  # number of each shard's first row, increasing
        self._numbers: dict[bytes, int] = {}  # number of each key's row
        self._next = 0

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
        self._numbers.update(zip(self._keys[name], self._rows(name), strict=True))

    def forget(self, names: Iterable[str]) -> None:
        """Leave out shards, and the keys that are in no other."""
        gone = list(names)
        for name in gone:
            del self.shards[name], self._keys[name], self._firsts[name]
        if gone:
            self._numbers.clear()
            for name in self.shards:
                self._number(name)

    def keys_in(self, names: Iterable[str]) -> list[bytes]:
        """Return the keys that are read from these shards."""
        rows = ((key, row) for name in names for key, row in zip(self._keys[name], self._rows(name), strict=True))
        return [key for key, row in rows if self._numbers[key] == row]

    def _rows(self, name: str) -> range:
        return range(self._firsts[name], self._firsts[name] + self.shards[name].count)

    def lacking(self, keys: Sequence[bytes]) -> list[int]:
        """Return the places of the keys that are in no shard."""
        return [place for place, key in enumerate(keys) if key not in self._numbers]

    def shards_of(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of the shards that hold some of the keys."""
        return list(self.places([key for key in keys if key in self._numbers]))

    def places(self, keys: Sequence[bytes]) -> dict[str, tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """Return, for each shard that holds some of the keys, their places in ``keys`` and their rows in the shard."""
        names, firsts = list(self._firsts), np.array(list(self._firsts.values()), dtype=np.intp)
        numbers = np.array([self._numbers[key] for key in keys], dtype=np.intp)
        shards = np.searchsorted(firsts, numbers, side="right") - 1
        order = np.argsort(numbers, kind="stable")  # each shard from front to back
        groups = np.split(order, np.flatnonzero(np.diff(shards[order])) + 1) if len(keys) else []
        return {names[shards[group[0]]]: (group, numbers[group] - firsts[shards[group[0]]]) for group in groups}
