"""Blocks of inputs: the batches that one process would embed, in files, each embedded by any process."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from midlayer_encoders._types import content_digest
from midlayer_encoders.files import write_file
from midlayer_encoders.sweeping.embedder import Embedder

_MAX_INPUTS = 4096  # of a block: a few blocks for each of 64 workers in a collection of a million
_MAX_TOKENS = 1 << 20


@dataclass
class _Part:
    """Batches under one prompt: positions in ``items``, of which only ``missing`` are stored."""

    prompt: str
    items: dict[str, Any] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    batches: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Planner(Embedder):
    """Writes what an embedder would embed to files in a folder, instead of embedding it.

    Batches are those of one process, so blocks have the vectors of one process, whoever embeds them.
    """

    folder: Path = Path()
    names: list[str] = field(default_factory=list)
    _parts: list[_Part] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, embedder: Embedder, folder: Path, seen: set[str] | None = None) -> Self:
        """Return the planner of an embedder; ``seen`` are the keys that another planner of its store has planned."""
        known = {each.name: getattr(embedder, each.name) for each in fields(embedder)}
        return cls(**known, folder=folder, _seen=set() if seen is None else seen)

    def __call__(self, items: Sequence[Any], keys: Sequence[str], prompt: str) -> None:
        """Plan the batches of the items that are neither stored nor planned."""
        distinct: dict[str, Any] = dict(zip(keys, items, strict=True))
        names = list(distinct)
        missing = {position for position in self.store.missing(names) if names[position] not in self._seen}
        self._seen.update(distinct)
        if not missing:
            return
        for batch in self._saved_plan(distinct, missing, prompt):
            if missing.intersection(batch):
                self._add(
                    {names[n]: distinct[names[n]] for n in batch}, {names[n] for n in missing & set(batch)}, prompt
                )

    def _add(self, items: dict[str, Any], missing: set[str], prompt: str) -> None:
        if not self._parts or self._parts[-1].prompt != prompt:
            self._parts.append(_Part(prompt))
        part = self._parts[-1]
        part.items |= items
        part.missing |= missing
        places = {key: place for place, key in enumerate(part.items)}
        part.batches.append([places[key] for key in items])
        num_batches = sum(len(each.batches) for each in self._parts)
        if sum(len(each.items) for each in self._parts) >= _MAX_INPUTS or num_batches * self.tokens >= _MAX_TOKENS:
            self.flush()

    def flush(self) -> list[str]:
        """Write the last block, and return the names of all."""
        if self._parts:
            keys = sorted(key for part in self._parts for key in part.missing)
            name = f"{content_digest(' '.join([self.store.key, *keys]), 8)}.block"
            write_file(self.folder / name, pickle.dumps(self._parts))
            self.names.append(name)
            self._parts.clear()
        return self.names


def embed_block(path: Path, embedder: Embedder) -> None:
    """Embed the inputs of a block that are not stored."""
    parts: list[_Part] = pickle.loads(path.read_bytes())
    for part in parts:
        names = list(part.items)
        missing = {position for position in embedder.store.missing(names) if names[position] in part.missing}
        if missing:
            embedder.embed(part.items, missing, part.batches, part.prompt)
