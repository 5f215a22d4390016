"""Tasks from your own files: the columns determine the type, and every row is validated."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from midlayer_encoders.files import check_regular_file, parse_json_object, read_text_file
from midlayer_encoders.tasks.beir import beir_files, beir_tables, finds_itself, pair_tables
from midlayer_encoders.tasks.table_files import (
    SUFFIXES,
    ColumnsError,
    Rule,
    Table,
    TaskFileError,
    is_label,
    is_score,
    is_text,
    read_table,
)
from midlayer_encoders.tasks.task_data import TASK_TYPES, TaskData, TaskType
from midlayer_encoders.validation import check_choice

_SPLIT_SEED = 42
_LONGEST_LABEL = 120  # bytes: with digest and suffix it is a file name, which has at most 255

# The first type whose columns are all present applies; the documentation states this order.
_TYPE_BY_COLUMNS: tuple[tuple[TaskType, tuple[str, ...]], ...] = (
    ("Reranking", ("query", "positive", "negative")),
    ("Reranking", ("anchor", "positive", "negative")),
    ("Retrieval", ("query", "positive")),
    ("Retrieval", ("anchor", "positive")),
    ("STS", ("sentence1", "sentence2", "score")),
    ("PairClassification", ("sentence1", "sentence2", "labels")),
    ("PairClassification", ("sentence1", "sentence2", "label")),
    ("Classification", ("text", "label")),
    ("Clustering", ("sentences", "labels")),
    ("Clustering", ("text", "labels")),
    ("Clustering", ("sentences", "label")),
)
# These have no column of their own: beside any other column, one of labels or scores under another name would be lost.
_TYPE_BY_ALL_COLUMNS: dict[frozenset[str], TaskType] = {
    frozenset(("sentence1", "sentence2")): "BitextMining",
    frozenset(("text",)): "Unlabeled",
    frozenset(("sentences",)): "Unlabeled",
}
_QUERY = ("query", "anchor")
# By type, mteb's name of each column and the names accepted in a file.
_COLUMNS: dict[TaskType, dict[str, tuple[str, ...]]] = {
    "Classification": {"text": ("text", "sentences"), "label": ("label", "labels")},
    "Clustering": {"sentences": ("sentences", "text"), "labels": ("labels", "label")},
    "PairClassification": {
        "sentence1": ("sentence1",),
        "sentence2": ("sentence2",),
        "labels": ("labels", "label"),
    },
    "Reranking": {"query": _QUERY, "positive": ("positive",), "negative": ("negative",)},
    "STS": {"sentence1": ("sentence1",), "sentence2": ("sentence2",), "score": ("score",)},
    "Retrieval": {"query": _QUERY, "positive": ("positive",)},
    "MultilabelClassification": {"text": ("text", "sentences"), "label": ("labels", "label")},
    "BitextMining": {"sentence1": ("sentence1",), "sentence2": ("sentence2",)},
    "Unlabeled": {"text": ("text", "sentences")},
}
_TRAINED: tuple[TaskType, ...] = ("Classification", "MultilabelClassification")
_NEIGHBORS = 5  # of mteb's multilabel classifier


def files_data(path: Path) -> TaskData:
    """Return the task in the file or folder ``path``.

    A folder holds ``test.*``, for a classification also ``train.*``, or ``corpus.*``, ``queries.*`` and
    ``qrels/test.*``. It may also hold a ``task.json`` with ``type`` and ``name``. A single file contains all data; the
    rows of a classification are then split into stratified halves with a fixed seed.

    Raises:
        TaskFileError: for invalid files or rows.
    """
    options = _options(path)
    read = _read_beir(path, options) or _read_rows(path, options)
    data_name = options.get("name") or (path.stem if path.is_file() else path.resolve().name)
    return TaskData(
        label=re.sub(r"[^\w.()-]+", "_", data_name).encode()[:_LONGEST_LABEL].decode(errors="ignore"),
        description=f"{read.type} from {', '.join(file.name for file in read.files)}. {read.note}".strip(),
        origin="files",
        type=read.type,
        splits=read.splits,
        why=read.why,
        note=read.note,
        settings=read.settings,
    )


class _Read(NamedTuple):
    """Fields of :class:`~midlayer_encoders.tasks.task_data.TaskData` that the files determine."""

    type: TaskType
    splits: Mapping[str, Mapping[str, list[Any]]]
    why: str
    files: Sequence[Path]
    note: str = ""
    settings: Mapping[str, int] = MappingProxyType({})


def _read_beir(path: Path, options: Mapping[str, str]) -> _Read | None:
    """Return the task in a folder with BEIR's layout, or ``None`` for other folders."""
    if not path.is_dir() or options.get("type", "Retrieval") != "Retrieval":
        return None
    files = beir_files(path, is_retrieval="type" in options)
    if files is None:
        return None
    tables = beir_tables(files)
    _check_corpus(tables, files["corpus"])
    settings, note = {}, ""
    if finds_itself(tables):
        settings = {"ignore_identical_ids": 1}
        note = "Queries are documents of the corpus themselves, under the same id: that one does not count as found."
    return _Read("Retrieval", tables, "corpus, queries and qrels", list(files.values()), note, settings)


def _read_rows(path: Path, options: Mapping[str, Any]) -> _Read:
    """Return the task in a file or in a folder with ``test.*``."""
    files = _split_files(path)
    test = read_table(files["test"])
    task_type, why = (options["type"], "task.json") if "type" in options else _type(test)
    rows = _checked(test, task_type)
    splits: dict[str, dict[str, list[Any]]] = {"test": rows}
    note = ""
    if task_type == "Retrieval":
        splits = pair_tables(rows["query"], rows["positive"])
        _check_corpus(splits, test.path)
    if task_type in _TRAINED and "train" in files:
        splits["train"] = _checked(read_table(files["train"]), task_type)
    elif task_type in _TRAINED:
        splits = _halves(rows, files["test"])
        evenly = "stratified by label" if task_type == "Classification" else "the labels spread evenly"
        note = f"There is no train file: the rows were split in halves, {evenly}, with seed {_SPLIT_SEED}."
    if task_type in (*_TRAINED, "Clustering"):
        splits = _numbered(splits, _label_column(task_type), path=path)
    if task_type == "MultilabelClassification" and sum(map(bool, splits["train"]["label"])) < _NEIGHBORS:
        raise TaskFileError(
            f"{path} must have {_NEIGHBORS} rows with a label or more to train on, as many as are compared with each "
            f"text, but has {sum(map(bool, splits['train']['label']))}. Add rows."
        )
    # mteb draws this many rows with replacement, ten times; 2048 are still quick to cluster.
    count = len(test.rows)
    settings = {"max_documents_per_cluster": min(count, 2048)} if task_type == "Clustering" else {}
    return _Read(task_type, splits, why, list(files.values()), note, settings)


def _check_corpus(tables: Mapping[str, Mapping[str, list[Any]]], path: Path) -> None:
    if len(tables["corpus"]["id"]) < 2:
        raise TaskFileError(f"{path} must have two passages or more, but has one: every search would find it.")


def _options(path: Path) -> dict[str, Any]:
    """Return the content of the folder's ``task.json``."""
    file = path / "task.json"
    if not path.is_dir() or not file.exists():
        return {}
    options = parse_json_object(read_text_file(file, TaskFileError), str(file), TaskFileError)
    if not all(isinstance(value, str) for value in options.values()):
        raise TaskFileError(f'{file} must be an object like {{"type": "Clustering", "name": "my titles"}}.')
    for key in options:
        check_choice(f"key of {file}", key, ("type", "name"))
    if "type" in options:
        check_choice(f"type in {file}", options["type"], TASK_TYPES)
    return options


def _split_files(path: Path) -> dict[str, Path]:
    """Return the file of each split: ``test`` and, if there is one, ``train``."""
    if not path.is_dir():
        check_regular_file(path, TaskFileError)
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


def _type(table: Table) -> tuple[TaskType, str]:
    """Return the first type whose columns are all present, and the reason."""
    columns = set(table.columns)
    for task_type, needed in _TYPE_BY_COLUMNS:
        if columns.issuperset(needed):
            why = f"columns {', '.join(needed)}"
            if needed[0] == "text" and any(isinstance(row.get(needed[1]), list) for row in table.rows):
                return "MultilabelClassification", f"{why}, which holds lists"
            return task_type, why
    if (alone := _TYPE_BY_ALL_COLUMNS.get(frozenset(columns))) is not None:
        return alone, f"columns {', '.join(table.columns)}" if len(columns) > 1 else f"column {table.columns[0]} alone"
    fits: dict[TaskType, str] = {}
    for task_type, needed in sorted(_TYPE_BY_COLUMNS, key=lambda rule: len(set(rule[1]) - columns)):
        missing = ", ".join(name for name in needed if name not in columns)
        fits.setdefault(task_type, f"{task_type} needs {', '.join(needed)} (missing: {missing})")
    alone_words = " Without labels, text must stand alone." if "text" in columns else ""
    if columns.issuperset(("sentence1", "sentence2")):
        alone_words = " Of translations, sentence1 and sentence2 must stand alone."
    raise ColumnsError(
        f"{table.path} must have the columns of a task, but has {', '.join(table.columns)}. "
        f"{'; '.join(fits.values())}.{alone_words}"
    )


def _checked(table: Table, task_type: TaskType) -> dict[str, list[Any]]:
    """Return the columns of ``task_type`` under mteb's names, after validating every row."""
    columns = {}
    for name, spellings in _COLUMNS[task_type].items():
        column = next((spelling for spelling in spellings if spelling in table.columns), None)
        if column is None:
            raise TaskFileError(
                f"{table.path} must have the column {' or '.join(spellings)} to be a {task_type}, "
                f"but has {', '.join(table.columns)}."
            )
        values = table.cells(column, _RULES.get((task_type, name), _TEXT))
        if (task_type, name) == ("Retrieval", "positive"):
            values = [[value] if isinstance(value, str) else value for value in values]
        columns[name] = [int(v) if isinstance(v, bool) else v for v in values]
    _check_whole(table, task_type, columns=columns)
    return columns


def _check_whole(table: Table, task_type: TaskType, *, columns: Mapping[str, list[Any]]) -> None:
    """Validate what spans several rows: classes, grades, and passages that are both positive and negative."""
    if task_type == "Reranking":
        pairs = zip(columns["positive"], columns["negative"], strict=True)
        both = [number for number, (right, wrong) in enumerate(pairs) if set(right) & set(wrong)]
        if both:
            text = next(text for text in columns["positive"][both[0]] if text in columns["negative"][both[0]])
            raise TaskFileError(
                table.complaint(both, f"a passage must not be both positive and negative: {text[:60]!r}")
            )
    if task_type == "BitextMining" and len(table.rows) < 2:
        raise TaskFileError(f"{table.path} must have two sentences or more, but has one: every search would find it.")
    if task_type not in ("STS", "PairClassification", "Clustering", *_TRAINED):
        return
    name = "score" if task_type == "STS" else _label_column(task_type)
    kinds = Counter(label for value in columns[name] for label in _several(value))
    if len(kinds) < 2:
        raise TaskFileError(
            f"{table.path} must have at least two different values in `{name}`, but all {len(table.rows)} rows have "
            f"{next(iter(kinds), 'none')!r}."
        )
    if len({isinstance(kind, str) for kind in kinds}) > 1:
        raise TaskFileError(f"{table.path} must have labels of one kind, but some are strings and some are numbers.")


def _label_column(task_type: TaskType) -> str:
    return "label" if task_type in _TRAINED else "labels"


def _several(value: Any) -> list[Any]:
    """Return the labels of a row as a list."""
    return value if isinstance(value, list) else [value]


def _halves(columns: Mapping[str, list[Any]], path: Path) -> dict[str, dict[str, list[Any]]]:
    """Return a train half and a test half in which every label has about the same share."""
    from sklearn.model_selection import train_test_split

    counts = Counter(label for value in columns["label"] for label in _several(value))
    # The rarest label of a row decides, so that the two rows of a rare label go to different halves.
    kinds = [
        min(_several(value), key=lambda label: (counts[label], str(label)), default=None) for value in columns["label"]
    ]
    rare = [label for label, count in counts.items() if count < 2]
    if rare:
        raise TaskFileError(
            f"{path} must have every label twice or more, to be split in train and test, but has one row of "
            f"{', '.join(map(repr, rare[:5]))}. Add rows, or give a train file and a test file."
        )
    numbers = range(len(columns["label"]))
    if any(isinstance(value, list) for value in columns["label"]):
        order = sorted(random.Random(_SPLIT_SEED).sample(numbers, len(numbers)), key=lambda number: str(kinds[number]))
        halves = [order[::2], order[1::2]]
    else:
        halves = train_test_split(numbers, test_size=0.5, stratify=columns["label"], random_state=_SPLIT_SEED)
    return {
        split: {name: [values[number] for number in sorted(half)] for name, values in columns.items()}
        for split, half in zip(("train", "test"), halves, strict=True)
    }


def _numbered(
    splits: Mapping[str, Mapping[str, list[Any]]], column: str, *, path: Path
) -> dict[str, dict[str, list[Any]]]:
    """Return the splits with labels as sorted numbers, which mteb's scores of two classes need."""
    labels_by_split = {
        split: {label for value in rows[column] for label in _several(value)} for split, rows in splits.items()
    }
    labels = set().union(*labels_by_split.values())
    unseen = labels_by_split["test"] - labels_by_split.get("train", labels_by_split["test"])
    if unseen:
        raise TaskFileError(
            f"{path} must have every label of its test rows among its train rows, but these are only in test: "
            f"{', '.join(sorted(map(repr, unseen))[:5])}."
        )
    numbers = {label: number for number, label in enumerate(sorted(labels))}

    def numbered(value: Any) -> Any:
        return [numbers[label] for label in value] if isinstance(value, list) else numbers[value]

    return {
        split: {name: [*map(numbered, values)] if name == column else values for name, values in rows.items()}
        for split, rows in splits.items()
    }


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


_TEXT: Rule = ("a string that is not empty", is_text)
_TEXTS: Rule = ("a list of strings, none of them empty (in CSV: as JSON)", _is_texts)
_LABEL: Rule = ("a label, a string or a whole number", is_label)
_LABELS: Rule = (
    "a list of labels, each once, strings or whole numbers (in CSV: as JSON)",
    lambda value: isinstance(value, list) and all(map(is_label, value)) and len(set(value)) == len(value),
)
_RULES: dict[tuple[TaskType, str], Rule] = {
    ("Classification", "label"): _LABEL,
    ("Clustering", "labels"): _LABEL,
    ("PairClassification", "labels"): ("0 or 1", lambda value: isinstance(value, int) and value in (0, 1)),
    ("Reranking", "positive"): _TEXTS,
    ("Reranking", "negative"): _TEXTS,
    ("STS", "score"): ("a finite number", is_score),
    ("Retrieval", "positive"): (
        "a string that is not empty, or a list of such (in CSV: as JSON)",
        lambda value: is_text(value) or _is_texts(value),
    ),
    ("MultilabelClassification", "label"): _LABELS,
}
