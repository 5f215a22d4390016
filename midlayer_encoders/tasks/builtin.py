"""Five tasks, one of each type, out of the docstrings of the libraries that are installed: no download, real prose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.tasks.docstrings import SHELVES, Entry, entries, versions
from midlayer_encoders.tasks.task_data import TaskData, TaskType

BUILTIN_TASKS: dict[str, TaskType] = {
    "DocstringLibraryClassification": "Classification",
    "DocstringSubjectClustering": "Clustering",
    "DocstringSameObjectPairs": "PairClassification",
    "DocstringDescriptionReranking": "Reranking",
    "DocstringNearnessSTS": "STS",
}
"""Label and type of each built-in task."""

STS_GRADES: tuple[str, ...] = (
    "objects of two libraries",
    "two subjects of one library",
    "two files of one subject",
    "two objects of one file",
    "one object",
)
"""What each grade of the built-in STS task means, from 0 to 4."""

Pool: TypeAlias = tuple[tuple[Entry, ...], ...]
"""The objects of each shelf."""

_PER_SHELF = 20
_CANDIDATES = 10


@cache
def builtin_data(label: str) -> TaskData:
    """Return the rows of the built-in task ``label``, the same for the same versions of the libraries."""
    made = _MAKERS[label](_pool())
    origin = ",".join(f"{name}-{version}" for name, version in versions().items())
    return TaskData(label=label, type=BUILTIN_TASKS[label], origin=origin, **made._asdict())


class _Rows(NamedTuple):
    """What a maker knows of its task, by the names of :class:`~midlayer_encoders.tasks.task_data.TaskData`."""

    description: str
    splits: Mapping[str, Mapping[str, Sequence[object]]]
    settings: Mapping[str, int] = MappingProxyType({})


def _library(pool: Pool) -> _Rows:
    numbers = {library: number for number, library in enumerate(SHELVES)}

    def columns(objects: Iterable[Entry]) -> dict[str, list[object]]:
        rows = [(text, numbers[entry.library]) for entry in objects for text in (entry.summary, entry.description)]
        return _columns(("text", "label"), rows)

    return _Rows(
        "Which of six libraries is a sentence from? Names that give it away are masked.",
        {  # an object's two texts are on the same side, or the one would give the other away
            "train": columns(entry for shelf in pool for entry in shelf[::2]),
            "test": columns(entry for shelf in pool for entry in shelf[1::2]),
        },
    )


def _subject(pool: Pool) -> _Rows:
    rows = [(entry.description, number) for number, shelf in enumerate(pool) for entry in shelf]
    return _Rows(
        "Descriptions of objects, to be clustered by the part of a library they are from.",
        {"test": _columns(("sentences", "labels"), rows)},
        # mteb draws this many with replacement, 16384 by default, ten times.
        settings={"max_documents_per_cluster": len(rows), "n_clusters": 5},
    )


def _same_object(pool: Pool) -> _Rows:
    rows = []
    for entry, shelf in _on_shelves(pool):
        rows.append((entry.summary, entry.description, 1))
        rows.append((entry.summary, _nearest(entry, shelf)[0].description, 0))
    return _Rows(
        "Do a summary and a description speak of one object? If not, of two of one subject.",
        {"test": _columns(("sentence1", "sentence2", "labels"), rows)},
    )


def _own_description(pool: Pool) -> _Rows:
    rows = [
        (entry.summary, [entry.description], [other.description for other in _nearest(entry, shelf)[: _CANDIDATES - 1]])
        for entry, shelf in _on_shelves(pool)
    ]
    return _Rows(
        f"A summary ranks its own description among {_CANDIDATES} of the same subject.",
        {"test": _columns(("query", "positive", "negative"), rows)},
    )


def _nearness(pool: Pool) -> _Rows:
    objects = sorted((entry for entry, _ in _on_shelves(pool)), key=_order)
    rows = []
    for entry in objects:
        partners: dict[int, list[Entry]] = {}
        for other in objects:
            partners.setdefault(_grade(entry, other), []).append(other)
        draw = int.from_bytes(_order(entry))
        for grade, others in sorted(partners.items()):
            rows.append((entry.summary, others[draw % len(others)].description, float(grade)))
    grades = "; ".join(f"{grade} = {meaning}" for grade, meaning in enumerate(STS_GRADES))
    return _Rows(
        f"A summary and a description, graded by how near their objects are, by rule: {grades}.",
        {"test": _columns(("sentence1", "sentence2", "score"), rows)},
    )


_MAKERS: dict[str, Callable[[Pool], _Rows]] = dict(
    zip(BUILTIN_TASKS, (_library, _subject, _same_object, _own_description, _nearness), strict=True)
)


def _on_shelves(pool: Pool) -> Iterator[tuple[Entry, Sequence[Entry]]]:
    """Every object, and the shelf that it is from."""
    return ((entry, shelf) for shelf in pool for entry in shelf)


@cache
def _pool() -> Pool:
    """Up to twenty objects of each shelf, drawn by the hash of their texts, so that a new release changes few."""
    shelves = {(library, shelf): list[Entry]() for library in SHELVES for shelf in SHELVES[library]}
    for entry in entries():
        shelves[entry.library, entry.shelf].append(entry)
    for (library, shelf), found in shelves.items():
        if len(found) < _CANDIDATES:
            raise MidlayerError(
                f"The built-in tasks read docstrings in Python sources and need {_CANDIDATES} in {library} ({shelf}), "
                f"but found {len(found)}. Install {library} with its .py files, or pass your own data as a task."
            )
    return tuple(tuple(sorted(found, key=_order)[:_PER_SHELF]) for found in shelves.values())


def _order(*objects: Entry) -> bytes:
    texts = "\n".join(entry.summary + entry.description for entry in objects)
    return hashlib.blake2b(texts.encode(), digest_size=8).digest()


def _nearest(entry: Entry, shelf: Sequence[Entry]) -> list[Entry]:
    """The other objects of a shelf, those of the same file first."""
    others = [other for other in shelf if other != entry]
    return sorted(others, key=lambda other: (other.module != entry.module, _order(entry, other)))


def _grade(one: Entry, other: Entry) -> int:
    """How many of library, subject, file and object two entries share: an index into :data:`STS_GRADES`."""
    pairs = zip(_place(one), _place(other), strict=True)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), len(STS_GRADES) - 1)


def _place(entry: Entry) -> tuple[str, str, str, str]:
    return entry.library, entry.shelf, entry.module, entry.name


def _columns(names: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, list[object]]:
    return {name: [row[number] for row in rows] for number, name in enumerate(names)}
