"""Tasks from your own data, in files or in memory: the columns determine the type, and every row is validated.

A folder may also hold a retrieval task in BEIR's layout.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from midlayer_encoders.files import check_regular_file
from midlayer_encoders.tasks import tables
from midlayer_encoders.tasks.tables import SUFFIXES, TEXT, USUAL_NAMES, Columns, Rule, Table, TaskFileError, read_table
from midlayer_encoders.tasks.task_data import TaskData, TaskType, as_columns
from midlayer_encoders.validation import lone_surrogate

#: The columns of each split; of a retrieval task, of ``corpus``, ``queries`` and ``qrels``.
Splits: TypeAlias = dict[str, dict[str, list[Any]]]

_SPLIT_SEED = 42
_MAX_LABEL_BYTES = 120  # with digest and suffix it is a file name, which has at most 255
_MAX_RELEVANCE = 1_000_000  # trec_eval allocates memory for every grade and returns 0 for 1e9

_QRELS = ("query-id", "corpus-id", "score")

_TEXTS: Rule = ("a list of strings, none of them empty (in CSV: as JSON)", tables.is_texts)
_OPTIONAL_TEXT: Rule = (
    "a string",
    lambda value: value is None or (isinstance(value, str) and lone_surrogate(value) is None),
)
_ID: Rule = (
    "an id, a string that is not empty or a whole number",
    lambda value: tables.is_text(value) or (isinstance(value, int) and not isinstance(value, bool)),
)
_RELEVANCE: Rule = (
    f"a whole number, 1 or more for what is relevant, {_MAX_RELEVANCE} at most",
    lambda value: tables.is_score(value) and value == int(value) and abs(value) <= _MAX_RELEVANCE,  # type: ignore[call-overload, arg-type]
)

_QUERY: tuple[str, Rule] = ("query anchor", TEXT)
_PAIR: dict[str, tuple[str, Rule]] = {"sentence1": ("sentence1", TEXT), "sentence2": ("sentence2", TEXT)}
# By type, mteb's name of each column, the names accepted in a file, and the rule of its cells. The first type whose
# columns are all present applies; the documentation states this order.
_COLUMNS: dict[TaskType, dict[str, tuple[str, Rule]]] = {
    "Reranking": {"query": _QUERY, "positive": ("positive", _TEXTS), "negative": ("negative", _TEXTS)},
    "Retrieval": {"query": _QUERY, "positive": ("positive", tables.TEXT_OR_TEXTS)},
    "STS": {**_PAIR, "score": ("score", tables.SCORE)},
    "PairClassification": {**_PAIR, "labels": ("labels label", tables.ZERO_ONE)},
    "Classification": {"text": ("text", TEXT), "label": ("label", tables.LABEL)},
    "Clustering": {"sentences": ("sentences text", TEXT), "labels": ("labels label", tables.LABEL)},
    "Unlabeled": {"text": ("text sentences", TEXT)},
}


def own_data(origin: Any, columns: Columns = USUAL_NAMES, name: str = "data") -> TaskData:
    """Return the task in a file or folder, or in data in memory.

    A folder holds ``test.*``, for a classification also ``train.*``, or ``corpus.*``, ``queries.*`` and
    ``qrels/test.*``. A single table contains all data; the rows of a classification are then split into stratified
    halves with a fixed seed.

    Args:
        origin: a path, or data in memory.
        columns: names of the columns.
        name: name of data in memory.

    Raises:
        TaskFileError: for invalid files or rows.
    """
    description = "memory"
    if isinstance(origin, Path):
        name = origin.stem if origin.is_file() else origin.resolve().name
    if (files := beir_files(origin)) is not None:
        if columns != USUAL_NAMES:
            names = "`text_column`, `label_column` and `drop_empty`"
            raise TaskFileError(f"{names} do not apply to {origin}, which is in BEIR's layout.")
        task = _read_beir(files)
    else:
        files = split_tables(origin, name)
        task = _read_rows(files, columns, name, origin if isinstance(origin, Path) else Path(name))
    if isinstance(origin, Path):
        description = ", ".join(file.name for file in files.values())
    label = re.sub(r"[^\w.()-]+", "_", name).encode()[:_MAX_LABEL_BYTES].decode(errors="ignore")
    return replace(task, label=label, description=f"{task.type} from {description}. {task.note}".strip())


def split_tables(origin: Any, name: str = "data") -> dict[str, Any]:
    """Return the file or the data of each split: ``test`` and, if there is one, ``train``."""
    if not isinstance(origin, Path):
        splits, suggestion = (origin if tables.is_dict_of_data(origin) else {"test": origin}), "Rename a split to test."
    elif not origin.is_dir():
        check_regular_file(origin, TaskFileError)
        return {"test": origin}
    else:
        splits = _files_by_stem(origin)
        suggestion = "Pass the path of a file, or of several, or rename one to test."
        name = str(origin)
    if "test" in splits:
        return {split: splits[split] for split in ("train", "test") if split in splits}
    if len(splits) == 1:
        return {"test": next(iter(splits.values()))}
    found = ", ".join(getattr(splits[split], "name", split) for split in splits) or f"no file of {', '.join(SUFFIXES)}"
    raise TaskFileError(f"{name} must hold a test split, or one table alone, but holds {found}. {suggestion}")


def _task_type(table: Table) -> TaskType | None:
    """Return the first type whose columns are all present."""
    for name, accepted in _COLUMNS.items():
        # Beside other columns, texts without labels may have labels under another name, which would be lost.
        is_alone = name != "Unlabeled" or len(table.columns) == 1
        if is_alone and all(set(table.columns) & set(names.split()) for names, _ in accepted.values()):
            return name
    return None


def _read_rows(files: Mapping[str, Any], columns: Columns, name: str, path: Path) -> TaskData:
    """Return the task in the table ``test``, and in ``train``, which is read only if the task needs it."""
    names = {split: f"{name}[{split!r}]" if len(files) > 1 else name for split in files}
    test = read_table(files["test"], columns, names["test"])
    found = _task_type(test)
    if found is None:
        raise TaskFileError(
            f"{test.path} must have the columns of a task, but has {', '.join(test.columns)}. A task has text and "
            f"label; sentence1, sentence2 and score or label; or query and positive; text must stand alone without "
            f"labels. {tables.COLUMN_CURE}"
        )
    rows = _check_rows(test, found)
    splits: Splits = {"test": rows}
    note = ""
    settings = {}
    if found == "Retrieval":
        splits = _pair_tables(rows["query"], rows["positive"], test.path)
    elif found == "Clustering":
        # mteb draws this many rows with replacement, ten times; 2048 are still quick to cluster.
        settings = {"max_documents_per_cluster": min(len(rows["labels"]), 2048)}
        splits = _number_labels(splits, "labels", path=path)
    elif found == "Classification":
        if "train" in files:
            splits["train"] = _check_rows(read_table(files["train"], columns, names["train"]), found)
        else:
            splits = _halves(rows, test.path)
            note = (
                f"There are no train rows: all rows were split in halves, stratified by label, with seed {_SPLIT_SEED}."
            )
        splits = _number_labels(splits, "label", path=path)
    return TaskData(type=found, splits=splits, note=note, settings=settings)


def _check_rows(table: Table, task_type: TaskType) -> dict[str, list[Any]]:
    """Return the columns of ``task_type`` under mteb's names, after validating every row."""
    accepted = _COLUMNS[task_type].values()
    rules = {table.column(*names.split(), purpose=f" to be a {task_type}"): rule for names, rule in accepted}
    table = table.complete(*rules)
    columns: dict[str, list[Any]] = {}
    for name, values in zip(_COLUMNS[task_type], table.check_columns(rules), strict=True):
        if (task_type, name) == ("Retrieval", "positive"):
            values = [[value] if isinstance(value, str) else value for value in values]
        numbers = bool if name == "score" else bool | float
        columns[name] = [int(value) if isinstance(value, numbers) else value for value in values]
        if name in ("score", "label", "labels"):
            table.check_distinct(columns[name], "scores" if name == "score" else "labels")
    if task_type == "Reranking":
        both = [set(right) & set(wrong) for right, wrong in zip(columns["positive"], columns["negative"], strict=True)]
        table.reject(
            [row for row, texts in enumerate(both) if texts],
            lambda row: f"a passage must not be both positive and negative: {min(both[row])[:60]!r}",
        )
    return columns


def _halves(columns: Mapping[str, list[Any]], path: Path) -> Splits:
    """Return a train half and a test half in which every label has about the same share."""
    from sklearn.model_selection import train_test_split

    labels = columns["label"]
    if rare := [label for label, count in Counter(labels).items() if count < 2]:
        raise TaskFileError(
            f"{path} must have every label twice or more, to be split in train and test, but has one row of "
            f"{', '.join(map(repr, rare[:5]))}. Add rows, or give train and test rows."
        )
    halves = train_test_split(range(len(labels)), test_size=0.5, stratify=labels, random_state=_SPLIT_SEED)
    return {
        split: {name: [values[number] for number in sorted(half)] for name, values in columns.items()}
        for split, half in zip(("train", "test"), halves, strict=True)
    }


def _number_labels(splits: Splits, column: str, *, path: Path) -> Splits:
    """Return the splits with labels as sorted numbers, which mteb's scores of two classes need."""
    labels = {label for rows in splits.values() for label in rows[column]}
    if unseen := labels.difference(splits.get("train", splits["test"])[column]):
        raise TaskFileError(
            f"{path} must have every label of its test rows among its train rows, but these are only in test: "
            f"{', '.join(sorted(map(repr, unseen))[:5])}."
        )
    numbers = {label: number for number, label in enumerate(sorted(labels))}
    return {split: {**rows, column: [numbers[label] for label in rows[column]]} for split, rows in splits.items()}


def _pair_tables(queries: Sequence[str], positives: Sequence[Sequence[str]], path: Path) -> Splits:
    """Return queries and their passages as a retrieval task whose corpus is all distinct passages.

    Rows with the same query become one query with all their passages.
    """
    positives_by_query: dict[str, set[str]] = {}
    for query, texts in zip(queries, positives, strict=True):
        positives_by_query.setdefault(query, set()).update(texts)
    # mteb ranks equal similarities by id, which must not depend on which passage is relevant.
    ids = {text: f"d{number:09}" for number, text in enumerate(sorted(set().union(*positives_by_query.values())))}
    names = {query: f"q{number}" for number, query in enumerate(positives_by_query)}
    judged = [(names[query], ids[text], 1) for query, texts in positives_by_query.items() for text in sorted(texts)]
    _check_corpus(ids, path)
    return {
        "corpus": {"id": list(ids.values()), "title": [""] * len(ids), "text": list(ids)},
        "queries": {"id": list(names.values()), "text": list(names)},
        "qrels": as_columns(_QRELS, judged),
    }


def _check_corpus(passages: Collection[str], path: Path) -> None:
    if len(passages) < 2:
        raise TaskFileError(f"{path} must have two passages or more, but has one: every search would find it.")


def _files_by_stem(folder: Path) -> dict[str, Path]:
    """Return the tables in a folder by their names without suffix."""
    files: dict[str, Path] = {}
    for file in sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES):
        if file.stem in files:
            raise TaskFileError(
                f"{folder} must hold one file of each name, but has {files[file.stem].name} and {file.name}: remove "
                "all but one."
            )
        files[file.stem] = file
    return files


def beir_files(origin: Any) -> dict[str, Path] | None:
    """Return the files ``corpus``, ``queries`` and ``qrels`` of a folder in BEIR's layout, else ``None``.

    Two of the three files without ``test.*`` identify the layout.
    """
    if not isinstance(origin, Path) or not origin.is_dir():
        return None
    qrels = origin / "qrels"
    files = _files_by_stem(origin)
    judged = _files_by_stem(qrels) if qrels.is_dir() else {}
    if "test" in files or len({"corpus", "queries"} & files.keys()) + qrels.is_dir() < 2:
        return None
    found = {name: files.get(name) for name in ("corpus", "queries")} | {"qrels/test": judged.get("test")}
    if missing := [name for name, file in found.items() if file is None]:
        raise TaskFileError(
            f"{origin} must hold corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR does, to be a Retrieval, but "
            f"has no {missing[0]}.* (qrels holds {', '.join(file.name for file in judged.values()) or 'no table'}). "
            "Add or rename a file, or put the rows in a test.jsonl of query and positive."
        )
    return {name.partition("/")[0]: file for name, file in found.items() if file is not None}


def _read_beir(files: Mapping[str, Path]) -> TaskData:
    """Return the task of files in BEIR's layout, without queries that ``qrels`` does not judge."""
    corpus, queries, qrels = (
        replace(read_table(files[name]), drop_empty=None) for name in ("corpus", "queries", "qrels")
    )
    documents = _ids(corpus)
    _check_corpus(documents, corpus.path)
    titles, texts = ([text or "" for text in corpus.cells(name, _OPTIONAL_TEXT)] for name in ("title", "text"))
    blank = [row for row, words in enumerate(zip(titles, texts, strict=True)) if not "".join(words).strip()]
    corpus.reject(blank, lambda _: "`text` must be a string that is not empty, unless `title` is")
    query_texts = dict(zip(_ids(queries), queries.cells("text", TEXT), strict=True))
    query_ids = _ids_of(qrels, "query-id", queries.path, query_texts)
    judged = _judgments(qrels, query_ids, _ids_of(qrels, "corpus-id", corpus.path, set(documents)))
    answered = {query for query, _ in judged}
    query_texts = {name: text for name, text in query_texts.items() if name in answered}
    splits = {
        "corpus": {"id": documents, "title": titles, "text": texts},
        "queries": {"id": list(query_texts), "text": list(query_texts.values())},
        "qrels": as_columns(_QRELS, [(*pair, score) for pair, score in judged.items()]),
    }
    passages = {
        name: {text.strip(), f"{title} {text}".strip()}
        for name, title, text in zip(documents, titles, texts, strict=True)
    }
    # Queries that are documents must not find themselves, unless that is judged relevant; equal ids of other texts are
    # arbitrary numbers.
    shared = [text.strip() in passages[name] for name, text in query_texts.items() if name in passages]
    finds_itself = any(query == document and score > 0 for (query, document), score in judged.items())
    if finds_itself or not shared or not all(shared):
        return TaskData(type="Retrieval", splits=splits)
    note = "Queries are documents of the corpus themselves, under the same id: that one does not count as found."
    return TaskData(type="Retrieval", splits=splits, note=note, settings={"ignore_identical_ids": 1})


def _judgments(table: Table, queries: Sequence[str], documents: Sequence[str]) -> dict[tuple[str, str], int]:
    """Return the relevance of pairs of a query and a document; every query needs a positive one."""
    scores = [int(score) for score in table.cells("score", _RELEVANCE)]
    judged: dict[tuple[str, str], int] = {}
    conflicting = [
        row
        for row, (query, document, score) in enumerate(zip(queries, documents, scores, strict=True))
        if judged.setdefault((query, document), score) != score
    ]
    table.reject(conflicting, lambda _: "the same query and document have another score above")
    answered = {query for (query, _), score in judged.items() if score > 0}
    table.reject(
        [row for row, query in enumerate(queries) if query not in answered],
        lambda row: f"every query must have a document whose `score` is 1 or more, but {queries[row]!r} has none",
    )
    return judged


def _ids_of(table: Table, name: str, path: Path, ids: Collection[str]) -> list[str]:
    """Return a column of ids as strings, all of which must be in the table of another file."""
    cure = f" Its first line must name the columns: {', '.join(_QRELS)}."
    values = [str(value) for value in table.cells(table.column(name, cure=cure), _ID)]
    bad = [row for row, value in enumerate(values) if value not in ids]
    table.reject(bad, lambda row: f"`{name}` must be an id of {path.name}, but there is no {values[row]!r}")
    return values


def _ids(table: Table) -> list[str]:
    """Return unique ids as strings."""
    name = table.column("_id", "id")
    values = [str(value) for value in table.cells(name, _ID)]
    first: dict[str, int] = {}
    table.reject(
        [row for row, value in enumerate(values) if first.setdefault(value, row) != row],
        lambda row: (
            f"`{name}` must not repeat, but {values[row]!r} is in {table.unit} {table.numbers[first[values[row]]]} too"
        ),
    )
    return values
