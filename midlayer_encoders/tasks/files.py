"""A task out of your own files: read, told apart by their columns, and checked row by row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from midlayer_encoders.errors import check_choice, shown
from midlayer_encoders.files import check_ordinary, json_object, read_whole
from midlayer_encoders.tasks.data import TASK_TYPES, TaskData, TaskType
from midlayer_encoders.tasks.reading import SUFFIXES, Table, TaskFileError, is_label, is_score, is_text, read_table

__all__ = ["files_data"]

_SPLIT_SEED = 42
_LONGEST_LABEL = 120  # bytes: with its digest and a suffix it is the name of a file, which has 255

# The first type whose columns are all there is the type: this order is the documented rule.
_TYPE_BY_COLUMNS: tuple[tuple[TaskType, tuple[str, ...]], ...] = (
    ("Reranking", ("query", "positive", "negative")),
    ("STS", ("sentence1", "sentence2", "score")),
    ("PairClassification", ("sentence1", "sentence2", "labels")),
    ("PairClassification", ("sentence1", "sentence2", "label")),
    ("Classification", ("text", "label")),
    ("Clustering", ("sentences", "labels")),
    ("Clustering", ("text", "labels")),
    ("Clustering", ("sentences", "label")),
)
# mteb's name of each column of a type, and the names under which it may stand in a file.
_COLUMNS: dict[TaskType, dict[str, tuple[str, ...]]] = {
    "Classification": {"text": ("text", "sentences"), "label": ("label", "labels")},
    "Clustering": {"sentences": ("sentences", "text"), "labels": ("labels", "label")},
    "PairClassification": {
        "sentence1": ("sentence1",),
        "sentence2": ("sentence2",),
        "labels": ("labels", "label"),
    },
    "Reranking": {"query": ("query",), "positive": ("positive",), "negative": ("negative",)},
    "STS": {"sentence1": ("sentence1",), "sentence2": ("sentence2",), "score": ("score",)},
}


def files_data(path: Path) -> TaskData:
    """Return the task that the file or folder ``path`` holds.

    A folder holds ``test.*``, for a classification also ``train.*``, and may hold a ``task.json`` with ``type`` and
    ``name``. A single file is all of the data; a classification is then split in halves, seeded, stratified by label.

    Raises:
        TaskFileError: naming the file and the rows that cannot be used, and what they must be.
    """
    options = _options(path)
    files = _split_files(path)
    test = read_table(files["test"])
    task_type = options.get("type") or _type(test)
    splits = {"test": _checked(test, task_type)}
    note = ""
    if task_type == "Classification" and "train" in files:
        splits["train"] = _checked(read_table(files["train"]), task_type)
    elif task_type == "Classification":
        splits = _halves(splits["test"], files["test"])
        note = f"There is no train file: the rows were split in halves, stratified by label, with seed {_SPLIT_SEED}."
    if task_type in ("Classification", "Clustering"):
        splits = _numbered(splits, _label_column(task_type), path=path)
    data_name = options.get("name") or (path.stem if path.is_file() else path.resolve().name)
    rows = len(next(iter(splits["test"].values())))
    return TaskData(
        label=re.sub(r"[^\w.()-]+", "_", data_name).encode()[:_LONGEST_LABEL].decode(errors="ignore"),
        type=task_type,
        splits=splits,
        description=f"{task_type} from {', '.join(file.name for file in files.values())}. {note}".strip(),
        origin="files",
        note=note,
        # mteb draws this many with replacement, ten times: as many as there are, no more than is quick to cluster.
        settings={"max_documents_per_cluster": min(rows, 2048)} if task_type == "Clustering" else {},
    )


def _options(path: Path) -> dict[str, Any]:
    """What the folder's ``task.json`` says."""
    file = path / "task.json"
    if not path.is_dir() or not file.exists():
        return {}
    options = json_object(read_whole(file, TaskFileError), str(file), TaskFileError)
    if not all(isinstance(value, str) for value in options.values()):
        raise TaskFileError(f'{file} must be an object like {{"type": "Clustering", "name": "my titles"}}.')
    for key in options:
        check_choice(f"key of {file}", key, ("type", "name"))
    if "type" in options:
        check_choice(f"type in {file}", options["type"], TASK_TYPES)
    return options


def _split_files(path: Path) -> dict[str, Path]:
    """The file of each split: ``test``, and ``train`` where there is one."""
    if not path.is_dir():
        check_ordinary(path, TaskFileError)
        return {"test": path}
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    for stem, count in Counter(file.stem for file in files).items():
        if count > 1:
            raise TaskFileError(
                f"{path} must hold one file of each split, but has {count} named {stem}.*: remove all but one."
            )
    by_stem = {file.stem: file for file in files}
    if "test" in by_stem:
        return {stem: by_stem[stem] for stem in ("train", "test") if stem in by_stem}
    if len(files) == 1:
        return {"test": files[0]}
    raise TaskFileError(
        f"{path} must hold a test file ({', '.join(f'test{suffix}' for suffix in SUFFIXES)}), or one file alone, "
        f"but holds {', '.join(file.name for file in files) or 'no such file'}."
    )


def _type(table: Table) -> TaskType:
    """The first type whose columns are all there."""
    columns = set(table.columns)
    for task_type, needed in _TYPE_BY_COLUMNS:
        if columns.issuperset(needed):
            return task_type
    fits: dict[TaskType, str] = {}
    for task_type, needed in sorted(_TYPE_BY_COLUMNS, key=lambda rule: len(set(rule[1]) - columns)):
        missing = ", ".join(name for name in needed if name not in columns)
        fits.setdefault(task_type, f"{task_type} needs {', '.join(needed)} (missing: {missing})")
    raise TaskFileError(
        f"{table.path} must have the columns of a task, but has {', '.join(table.columns)}. {'; '.join(fits.values())}."
    )


def _checked(table: Table, task_type: TaskType) -> dict[str, list[Any]]:
    """The columns of ``task_type`` under mteb's names, every row of them usable."""
    columns = {}
    for name, spellings in _COLUMNS[task_type].items():
        found = next((spelling for spelling in spellings if spelling in table.columns), None)
        if found is None:
            raise TaskFileError(
                f"{table.path} must have the column {' or '.join(spellings)} to be a {task_type}, "
                f"but has {', '.join(table.columns)}."
            )
        values = [row.get(found) for row in table.rows]
        requirement, is_good = _REQUIREMENTS.get((task_type, name), _TEXT)
        bad = [number for number, value in enumerate(values) if not is_good(value)]
        if bad:
            raise TaskFileError(
                table.complaint(bad, f"`{found}` must be {requirement}, but got {shown(values[bad[0]])}")
            )
        columns[name] = [int(v) if isinstance(v, bool) else v for v in values]
    _check_whole(table, task_type, columns=columns)
    return columns


def _check_whole(table: Table, task_type: TaskType, *, columns: Mapping[str, list[Any]]) -> None:
    """What no single row shows: classes, grades, and passages that are both right and wrong."""
    if task_type == "Reranking":
        pairs = zip(columns["positive"], columns["negative"], strict=True)
        both = [number for number, (right, wrong) in enumerate(pairs) if set(right) & set(wrong)]
        if both:
            text = next(text for text in columns["positive"][both[0]] if text in columns["negative"][both[0]])
            raise TaskFileError(
                table.complaint(both, f"a passage must not be both positive and negative: {text[:60]!r}")
            )
        return
    name = "score" if task_type == "STS" else _label_column(task_type)
    kinds = Counter(columns[name])
    if len(kinds) < 2:
        raise TaskFileError(
            f"{table.path} must have at least two different values in `{name}`, but all {len(table.rows)} rows have "
            f"{next(iter(kinds))!r}."
        )
    if len({isinstance(kind, str) for kind in kinds}) > 1:
        raise TaskFileError(f"{table.path} must have labels of one kind, but some are strings and some are numbers.")


def _label_column(task_type: TaskType) -> str:
    return "label" if task_type == "Classification" else "labels"


def _halves(columns: Mapping[str, list[Any]], path: Path) -> dict[str, dict[str, list[Any]]]:
    """A train and a test half with the same share of every label, drawn by a seed."""
    from sklearn.model_selection import train_test_split

    rare = [label for label, count in Counter(columns["label"]).items() if count < 2]
    if rare:
        raise TaskFileError(
            f"{path} must have every label twice or more, to be split in train and test, but has one row of "
            f"{', '.join(map(repr, rare[:5]))}. Add rows, or give a train file and a test file."
        )
    numbers = range(len(columns["label"]))
    halves = train_test_split(numbers, test_size=0.5, stratify=columns["label"], random_state=_SPLIT_SEED)
    return {
        split: {name: [values[number] for number in sorted(half)] for name, values in columns.items()}
        for split, half in zip(("train", "test"), halves, strict=True)
    }


def _numbered(
    splits: Mapping[str, Mapping[str, list[Any]]], column: str, *, path: Path
) -> dict[str, dict[str, list[Any]]]:
    """Labels as numbers, in the labels' order: mteb's scores of two classes need them."""
    labels = {label for rows in splits.values() for label in rows[column]}
    unseen = set(splits["test"][column]) - set(splits.get("train", splits["test"])[column])
    if unseen:
        raise TaskFileError(
            f"{path} must have every label of its test rows among its train rows, but these are only in test: "
            f"{', '.join(sorted(map(repr, unseen))[:5])}."
        )
    numbers = {label: number for number, label in enumerate(sorted(labels))}
    return {
        split: {name: [numbers[v] for v in values] if name == column else values for name, values in rows.items()}
        for split, rows in splits.items()
    }


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


_TEXT: tuple[str, Callable[[object], bool]] = ("a string that is not empty", is_text)
_TEXTS: tuple[str, Callable[[object], bool]] = ("a list of strings, none of them empty (in CSV: as JSON)", _is_texts)
_LABEL: tuple[str, Callable[[object], bool]] = ("a label, a string or a whole number", is_label)
_REQUIREMENTS: dict[tuple[TaskType, str], tuple[str, Callable[[object], bool]]] = {
    ("Classification", "label"): _LABEL,
    ("Clustering", "labels"): _LABEL,
    ("PairClassification", "labels"): ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1)),
    ("Reranking", "positive"): _TEXTS,
    ("Reranking", "negative"): _TEXTS,
    ("STS", "score"): ("a finite number", is_score),
}
