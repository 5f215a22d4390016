"""The rows of the built-in tasks, from the texts of documented objects."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from midlayer_encoders.tasks.docstrings import BUILTIN_SETS, STS_GRADES, Entry
from midlayer_encoders.tasks.task_data import as_columns

_CANDIDATES = 10

#: The objects of each shelf.
Pool: TypeAlias = tuple[tuple[Entry, ...], ...]


def numbered_tasks(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Return the built-in tasks of each set, with numbers of texts in place of texts."""
    texts = [text for entry in entries for text in (entry.summary, entry.description)]
    numbers = {text: number for number, text in enumerate(texts)}

    def with_numbers(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item if name == "description" else with_numbers(item) for name, item in value.items()}
        if isinstance(value, list):
            return [with_numbers(item) for item in value]
        return numbers[value] if isinstance(value, str) else value

    sets = {name: builtin_tasks(entries, size) for name, size in BUILTIN_SETS.items()}
    return {name: {label: with_numbers(task) for label, task in tasks.items()} for name, tasks in sets.items()}


def builtin_tasks(entries: Sequence[Entry], size: int) -> dict[str, dict[str, Any]]:
    """Return description, splits and settings of each built-in task over ``size`` objects of each shelf."""
    pool = _pool(entries, size)
    return {
        "DocstringLibraryClassification": _library(pool),
        "DocstringSubjectClustering": _subject(pool),
        "DocstringSameObjectPairs": _same_object(pool),
        "DocstringDescriptionReranking": _own_description(pool),
        "DocstringNearnessSTS": _nearness(pool),
    }


def _library(pool: Pool) -> dict[str, Any]:
    numbers = {library: number for number, library in enumerate(dict.fromkeys(shelf[0].library for shelf in pool))}

    def columns(objects: Iterable[Entry]) -> dict[str, list[object]]:
        rows = [(text, numbers[entry.library]) for entry in objects for text in (entry.summary, entry.description)]
        return as_columns(("text", "label"), rows)

    return {
        "description": "Which of six libraries is a sentence from? Names that give it away are masked.",
        "splits": {  # both texts of an object are in the same split; otherwise one would reveal the other
            "train": columns(entry for shelf in pool for entry in shelf[::2]),
            "test": columns(entry for shelf in pool for entry in shelf[1::2]),
        },
    }


def _subject(pool: Pool) -> dict[str, Any]:
    rows = [(entry.description, number) for number, shelf in enumerate(pool) for entry in shelf]
    return {
        "description": "Descriptions of objects, to be clustered by the part of a library they are from.",
        "splits": {"test": as_columns(("sentences", "labels"), rows)},
        # mteb draws this many rows with replacement, 16384 by default, ten times.
        "settings": {"max_documents_per_cluster": len(rows), "n_clusters": 5},
    }


def _same_object(pool: Pool) -> dict[str, Any]:
    rows = []
    for entry, shelf in _on_shelves(pool):
        rows.append((entry.summary, entry.description, 1))
        rows.append((entry.summary, _nearest(entry, shelf)[0].description, 0))
    return {
        "description": "Do a summary and a description speak of one object? If not, of two of one subject.",
        "splits": {"test": as_columns(("sentence1", "sentence2", "labels"), rows)},
    }


def _own_description(pool: Pool) -> dict[str, Any]:
    rows = [
        (entry.summary, [entry.description], [other.description for other in _nearest(entry, shelf)[: _CANDIDATES - 1]])
        for entry, shelf in _on_shelves(pool)
    ]
    return {
        "description": f"A summary ranks its own description among {_CANDIDATES} of the same subject.",
        "splits": {"test": as_columns(("query", "positive", "negative"), rows)},
    }


def _nearness(pool: Pool) -> dict[str, Any]:
    objects = sorted((entry for entry, _ in _on_shelves(pool)), key=_order)
    rows = []
    for entry in objects:
        partners: dict[int, list[Entry]] = {}
        for other in objects:
            partners.setdefault(_grade(entry, other), []).append(other)
        draw = int.from_bytes(_order(entry))
        for grade, candidates in sorted(partners.items()):
            rows.append((entry.summary, candidates[draw % len(candidates)].description, float(grade)))
    grades = "; ".join(f"{grade} = {meaning}" for grade, meaning in enumerate(STS_GRADES))
    return {
        "description": f"A summary and a description, graded by how near their objects are, by rule: {grades}.",
        "splits": {"test": as_columns(("sentence1", "sentence2", "score"), rows)},
    }


def _on_shelves(pool: Pool) -> Iterator[tuple[Entry, Sequence[Entry]]]:
    """Return every object and its shelf."""
    return ((entry, shelf) for shelf in pool for entry in shelf)


def _pool(entries: Sequence[Entry], size: int) -> Pool:
    """Return ``size`` objects of each shelf, ordered by a hash of their texts so that new texts change few rows."""
    shelves: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        shelves.setdefault((entry.library, entry.shelf), []).append(entry)
    return tuple(tuple(sorted(objects, key=_order)[:size]) for objects in shelves.values())


def _order(*objects: Entry) -> bytes:
    texts = "\n".join(entry.summary + entry.description for entry in objects)
    return hashlib.blake2b(texts.encode(), digest_size=8).digest()


def _nearest(entry: Entry, shelf: Sequence[Entry]) -> list[Entry]:
    """Return the other objects of a shelf, first from the same file."""
    neighbors = [other for other in shelf if other != entry]
    return sorted(neighbors, key=lambda other: (other.module != entry.module, _order(entry, other)))


def _grade(entry: Entry, other: Entry) -> int:
    """Return how many of library, subject, file and object two entries share: an index into :data:`STS_GRADES`."""
    pairs = zip(entry[:4], other[:4], strict=True)  # library, shelf, module and name
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), len(STS_GRADES) - 1)
