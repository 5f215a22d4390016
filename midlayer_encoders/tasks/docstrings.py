"""Five built-in tasks of different types, without downloads.

Their texts are plain sentences from the docstrings of five libraries and the standard library (``NOTICE``).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from midlayer_encoders.tasks.task_data import TaskData, TaskType

#: Label and type of each built-in task.
BUILTIN_TASKS: dict[str, TaskType] = {
    "DocstringLibraryClassification": "Classification",
    "DocstringSubjectClustering": "Clustering",
    "DocstringSameObjectPairs": "PairClassification",
    "DocstringDescriptionReranking": "Reranking",
    "DocstringNearnessSTS": "STS",
}

#: Meaning of each grade of the built-in STS task, from 0 to 4.
STS_GRADES: tuple[str, ...] = (
    "objects of two libraries",
    "two subjects of one library",
    "two files of one subject",
    "two objects of one file",
    "one object",
)

#: Names of the sets of all built-in tasks, and the number of objects of each subject.
BUILTIN_SETS: dict[str, int] = {"builtin": 20, "builtin-small": 4}

#: The texts, the versions of the libraries that they are from, and the rows of the tasks, with numbers of texts;
#: ``benchmarks/quality/docstring_texts`` writes them.
TEXTS = Path(__file__).with_name("docstring_texts.json")


class Entry(NamedTuple):
    """A documented object with two texts from its docstring.

    Attributes:
        library: package that documents the object, or ``stdlib``.
        shelf: subject within the library.
        module: file that defines the object, relative to the library's root.
        name: qualified name in the file.
        summary: first sentence.
        description: sentences after the first.
    """

    library: str
    shelf: str
    module: str
    name: str
    summary: str
    description: str


@cache
def _content() -> dict[str, Any]:
    return json.loads(TEXTS.read_bytes())  # type: ignore[no-any-return]


@cache
def entries() -> tuple[Entry, ...]:
    """Return all objects, in the order of their libraries and subjects; their texts are distinct."""
    return tuple(Entry(*fields) for fields in _content()["entries"])


@cache
def builtin_data(label: str, name: str = "builtin") -> TaskData:
    """Return the rows of the built-in task ``label`` in the set ``name``."""
    texts = [text for entry in entries() for text in (entry.summary, entry.description)]
    task = dict(_content()["tasks"][name][label])
    splits = {
        split: {column: _with_texts(column, cells, texts) for column, cells in columns.items()}
        for split, columns in task.pop("splits").items()
    }
    return TaskData(label=label, type=BUILTIN_TASKS[label], origin="docstrings", splits=splits, **task)


def _with_texts(column: str, cells: list[Any], texts: list[str]) -> list[Any]:
    """Return a column with texts in place of their numbers; labels and scores stay."""
    if column in ("label", "labels", "score"):
        return cells
    return [[texts[number] for number in cell] if isinstance(cell, list) else texts[cell] for cell in cells]
