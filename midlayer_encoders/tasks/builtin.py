"""Five tasks, one of each type, out of the docstrings of the libraries that are installed: no download, real prose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.tasks.data import TaskData, TaskType
from midlayer_encoders.tasks.docstrings import SHELVES, Entry, entries, versions

__all__ = ["BUILTIN_TASKS", "STS_GRADES", "builtin_data"]

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
    return _MAKERS[label](_pool())


def _library(pool: Pool) -> TaskData:
    numbers = {library: number for number, library in enumerate(SHELVES)}

    def columns(objects: Iterable[Entry]) -> dict[str, list[object]]:
        rows = [(text, numbers[entry.library]) for entry in objects for text in (entry.summary, entry.description)]
        return _columns(("text", "label"), rows)

    # An object's two texts are on the same side, or the one would give the other away.
    return _data(
        "DocstringLibraryClassification",
        {
            "train": columns(entry for shelf in pool for entry in shelf[::2]),
            "test": columns(entry for shelf in pool for entry in shelf[1::2]),
        },
        description="Which of six libraries is a sentence from? Names that give it away are masked.",
    )


def _subject(pool: Pool) -> TaskData:
    objects = [entry for shelf in pool for entry in shelf]
    subjects = [f"{entry.library}.{entry.shelf}" for entry in objects]
    numbers = {subject: number for number, subject in enumerate(dict.fromkeys(subjects))}
    return _data(
        "DocstringSubjectClustering",
        {
            "test": {
                "sentences": [entry.description for entry in objects],
                "labels": [numbers[subject] for subject in subjects],
            }
        },
        description="Descriptions of objects, to be clustered by the part of a library they are from.",
        # mteb draws this many with replacement, 16384 by default, ten times.
        settings={"max_documents_per_cluster": len(objects), "n_clusters": 5},
    )


def _same_object(pool: Pool) -> TaskData:
    rows = []
    for shelf in pool:
        for entry in shelf:
            rows.append((entry.summary, entry.description, 1))
            rows.append((entry.summary, _nearest(entry, shelf)[0].description, 0))
    return _data(
        "DocstringSameObjectPairs",
        {"test": _columns(("sentence1", "sentence2", "labels"), rows)},
        description="Do a summary and a description speak of one object? If not, of two of one subject.",
    )


def _own_description(pool: Pool) -> TaskData:
    rows = [
        (entry.summary, [entry.description], [other.description for other in _nearest(entry, shelf)[: _CANDIDATES - 1]])
        for shelf in pool
        for entry in shelf
    ]
    return _data(
        "DocstringDescriptionReranking",
        {"test": _columns(("query", "positive", "negative"), rows)},
        description=f"A summary ranks its own description among {_CANDIDATES} of the same subject.",
    )


def _nearness(pool: Pool) -> TaskData:
    objects = sorted((entry for shelf in pool for entry in shelf), key=_order)
    rows = []
    for entry in objects:
        partners: dict[int, list[Entry]] = {}
        for other in objects:
            partners.setdefault(_grade(entry, other), []).append(other)
        draw = int.from_bytes(_order(entry))
        for grade, others in sorted(partners.items()):
            rows.append((entry.summary, others[draw % len(others)].description, float(grade)))
    grades = "; ".join(f"{grade} = {meaning}" for grade, meaning in enumerate(STS_GRADES))
    return _data(
        "DocstringNearnessSTS",
        {"test": _columns(("sentence1", "sentence2", "score"), rows)},
        description=f"A summary and a description, graded by how near their objects are, by rule: {grades}.",
    )


_MAKERS: dict[str, Callable[[Pool], TaskData]] = {
    "DocstringLibraryClassification": _library,
    "DocstringSubjectClustering": _subject,
    "DocstringSameObjectPairs": _same_object,
    "DocstringDescriptionReranking": _own_description,
    "DocstringNearnessSTS": _nearness,
}


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


def _data(
    label: str,
    splits: Mapping[str, Mapping[str, Sequence[object]]],
    *,
    description: str,
    settings: Mapping[str, int] = MappingProxyType({}),
) -> TaskData:
    origin = ",".join(f"{name}-{version}" for name, version in versions().items())
    return TaskData(
        label=label,
        type=BUILTIN_TASKS[label],
        splits=splits,
        description=description,
        origin=origin,
        settings=settings,
    )
