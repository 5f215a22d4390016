"""Tasks from your own files: the columns determine the type, and every row is validated.

A folder may also hold a retrieval task in BEIR's layout.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from midlayer_encoders.files import check_regular_file, shell_path
from midlayer_encoders.tasks import table_files
from midlayer_encoders.tasks.table_files import SUFFIXES, TEXT, USUAL_NAMES, Columns, Rule, Table, TaskFileError
from midlayer_encoders.tasks.task_data import TaskData, TaskType, as_columns
from midlayer_encoders.validation import lone_surrogate

#: The columns of each split; of a retrieval task, of ``corpus``, ``queries`` and ``qrels``.
Tables: TypeAlias = dict[str, dict[str, list[Any]]]

_SPLIT_SEED = 42
_LONGEST_LABEL = 120  # bytes: with digest and suffix it is a file name, which has at most 255
_GUESSED_ROWS = 1000  # enough to see which columns hold texts and labels
_MOST_RELEVANT = 1_000_000  # trec_eval allocates memory for every grade and returns 0 for 1e9

_QRELS = ("query-id", "corpus-id", "score")
_QRELS_HEADER = f" Its first line must name the columns: {', '.join(_QRELS)}."

_TEXTS: Rule = ("a list of strings, none of them empty (in CSV: as JSON)", table_files.is_texts)
_OPTIONAL_TEXT: Rule = (
    "a string",
    lambda value: value is None or (isinstance(value, str) and lone_surrogate(value) is None),
)
_ID: Rule = (
    "an id, a string that is not empty or a whole number",
    lambda value: table_files.is_text(value) or (isinstance(value, int) and not isinstance(value, bool)),
)
_RELEVANCE: Rule = (
    f"a whole number, 1 or more for what is relevant, {_MOST_RELEVANT} at most",
    lambda value: table_files.is_score(value) and value == int(value) and abs(value) <= _MOST_RELEVANT,  # type: ignore[call-overload, arg-type]
)

_QUERY: tuple[str, Rule] = ("query anchor", TEXT)
_PAIR: dict[str, tuple[str, Rule]] = {"sentence1": ("sentence1", TEXT), "sentence2": ("sentence2", TEXT)}
# By type, mteb's name of each column, the names accepted in a file, and the rule of its cells. The first type whose
# columns are all present applies; the documentation states this order.
_COLUMNS: dict[TaskType, dict[str, tuple[str, Rule]]] = {
    "Reranking": {"query": _QUERY, "positive": ("positive", _TEXTS), "negative": ("negative", _TEXTS)},
    "Retrieval": {"query": _QUERY, "positive": ("positive", table_files.TEXT_OR_TEXTS)},
    "STS": {**_PAIR, "score": ("score", table_files.SCORE)},
    "PairClassification": {**_PAIR, "labels": ("labels label", table_files.ZERO_ONE)},
    "Classification": {"text": ("text", TEXT), "label": ("label", table_files.LABEL)},
    "Clustering": {"sentences": ("sentences text", TEXT), "labels": ("labels label", table_files.LABEL)},
    "Unlabeled": {"text": ("text sentences", TEXT)},
}


def files_data(path: Path, columns: Columns = USUAL_NAMES) -> TaskData:
    """Return the task in the file or folder ``path``.

    A folder holds ``test.*``, for a classification also ``train.*``, or ``corpus.*``, ``queries.*`` and
    ``qrels/test.*``. A single file contains all data; the rows of a classification are then split into stratified
    halves with a fixed seed.

    Raises:
        TaskFileError: for invalid files or rows.
    """
    if (path / "task.json").exists():  # release 0.2 read it
        raise TaskFileError(
            f"{path} must not hold task.json: the columns determine the type of the task, and its name is that of "
            "the folder. Remove it."
        )
    files = _beir_files(path)
    if files is None:
        files = _split_files(path)
        readers = {split: partial(table_files.read_table, file, columns) for split, file in files.items()}
        task = _read_rows(readers, path)
    elif columns != USUAL_NAMES:
        names = "`text_column`, `label_column` and `drop_empty`"
        raise TaskFileError(f"{names} do not apply to {path}, which is in BEIR's layout.")
    else:
        task = _read_beir(files)
    names = ", ".join(file.name for file in files.values())
    return _labeled(task, path.stem if path.is_file() else path.resolve().name, names)


def is_beir(path: Path) -> bool:
    """Return whether a folder is in BEIR's layout, whose columns have fixed names."""
    return _beir_files(path) is not None


def own_tables(path: Path, columns: Columns) -> list[Table]:
    """Return the tables in the file or folder ``path``; none for a folder in BEIR's layout."""
    files = {} if _beir_files(path) else _split_files(path)
    return [table_files.read_table(file, columns) for file in files.values()]


def tables_data(tables: Mapping[str, Table], name: str) -> TaskData:
    """Return the task in the tables ``test`` and, for a classification, ``train``.

    Raises:
        TaskFileError: for invalid columns or rows.
    """
    readers = {split: partial(tables.__getitem__, split) for split in tables}
    return _labeled(_read_rows(readers, Path(name)), name, "memory")


def _labeled(task: TaskData, name: str, origin: str) -> TaskData:
    """Return a task with a name that a file can have, and a description."""
    label = re.sub(r"[^\w.()-]+", "_", name).encode()[:_LONGEST_LABEL].decode(errors="ignore")
    return replace(task, label=label, description=f"{task.type} from {origin}. {task.note}".strip())


def _read_beir(files: Mapping[str, Path]) -> TaskData:
    """Return the task in a folder with BEIR's layout."""
    tables = _beir_tables(files)
    _check_corpus(tables, files["corpus"])
    if not _finds_itself(tables):
        return TaskData(type="Retrieval", splits=tables)
    note = "Queries are documents of the corpus themselves, under the same id: that one does not count as found."
    return TaskData(type="Retrieval", splits=tables, note=note, settings={"ignore_identical_ids": 1})


def _read_rows(readers: Mapping[str, Callable[[], Table]], path: Path) -> TaskData:
    """Return the task in the table ``test``, and in ``train``, which is read only if the task needs it."""
    test = readers["test"]()
    found = task_type(test)
    if found is None:
        cure = column_cure(test) or (
            "A task has text and label; sentence1, sentence2 and score or label; or query and positive. "
            "Texts without labels must stand alone."
        )
        raise TaskFileError(f"{test.path} must have the columns of a task, but has {', '.join(test.columns)}. {cure}")
    rows = _checked(test, found)
    splits: Tables = {"test": rows}
    note = ""
    settings = {}
    if found == "Retrieval":
        splits = _pair_tables(rows["query"], rows["positive"])
        _check_corpus(splits, test.path)
    elif found == "Clustering":
        # mteb draws this many rows with replacement, ten times; 2048 are still quick to cluster.
        settings = {"max_documents_per_cluster": min(len(rows["labels"]), 2048)}
        splits = _numbered(splits, "labels", path=path)
    elif found == "Classification":
        if "train" in readers:
            splits["train"] = _checked(readers["train"](), found)
        else:
            splits = _halves(rows, test.path)
            note = (
                f"There are no train rows: all rows were split in halves, stratified by label, with seed {_SPLIT_SEED}."
            )
        splits = _numbered(splits, "label", path=path)
    return TaskData(type=found, splits=splits, note=note, settings=settings)


def _check_corpus(tables: Tables, path: Path) -> None:
    if len(tables["corpus"]["id"]) < 2:
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


def _split_files(path: Path) -> dict[str, Path]:
    """Return the file of each split: ``test`` and, if there is one, ``train``."""
    if not path.is_dir():
        check_regular_file(path, TaskFileError)
        return {"test": path}
    files = _files_by_stem(path)
    if "test" in files:
        return {stem: files[stem] for stem in ("train", "test") if stem in files}
    if len(files) == 1:
        return {"test": next(iter(files.values()))}
    raise TaskFileError(
        f"{path} must hold a test file ({', '.join(f'test{suffix}' for suffix in SUFFIXES)}), or one file alone, "
        f"but holds {', '.join(file.name for file in files.values()) or 'no such file'}. Pass the path of a file, or "
        "of several, or rename one to test."
    )


def _beir_files(path: Path) -> dict[str, Path] | None:
    """Return the files ``corpus``, ``queries`` and ``qrels`` of a folder in BEIR's layout, else ``None``.

    Two of the three files without ``test.*`` identify the layout.
    """
    if not path.is_dir():
        return None
    files = _files_by_stem(path)
    qrels = path / "qrels"
    present = [name for name in ("corpus", "queries") if name in files] + (["qrels"] if qrels.is_dir() else [])
    if "test" in files or len(present) < 2:
        return None
    for name in ("corpus", "queries", "qrels"):
        if name not in present:
            lacking = "qrels/" if name == "qrels" else f"{name}.*"
            raise TaskFileError(
                f"{path} must hold corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR does, to be a Retrieval, "
                f"but has no {lacking}. Add it, or put the rows in a test.jsonl of query and positive."
            )
    judged = _files_by_stem(qrels)
    if "test" not in judged:
        names = ", ".join(file.name for file in judged.values()) or "no such file"
        cure = "Rename the one to score on to test" if judged else "Add it"
        raise TaskFileError(f"{qrels} must hold test.tsv, which says what is relevant, but holds {names}. {cure}.")
    return {"corpus": files["corpus"], "queries": files["queries"], "qrels": judged["test"]}


def _beir_tables(files: Mapping[str, Path]) -> Tables:
    """Return the tables of files in BEIR's layout, without queries that ``qrels`` does not judge."""
    corpus, queries, qrels = (
        replace(table_files.read_table(files[name]), drop_empty=None) for name in ("corpus", "queries", "qrels")
    )
    documents = _ids(corpus)
    titles = [title or "" for title in corpus.cells("title", _OPTIONAL_TEXT)]
    texts = [text or "" for text in corpus.cells(corpus.column("text"), _OPTIONAL_TEXT)]
    blank = [row for row, words in enumerate(zip(titles, texts, strict=True)) if not "".join(words).strip()]
    corpus.reject(blank, lambda _: "`text` must be a string that is not empty, unless `title` is")
    names = _ids(queries)
    query_texts = dict(zip(names, queries.cells(queries.column("text"), TEXT), strict=True))
    query_ids = _ids_of(qrels, "query-id", queries.path, query_texts)
    judged = _judged(qrels, query_ids, _ids_of(qrels, "corpus-id", corpus.path, set(documents)))
    answered = set(judged["query-id"])
    judged_names = [name for name in names if name in answered]
    return {
        "corpus": {"id": documents, "title": titles, "text": texts},
        "queries": {"id": judged_names, "text": [query_texts[name] for name in judged_names]},
        "qrels": judged,
    }


def _judged(table: Table, query_ids: Sequence[str], document_ids: Sequence[str]) -> dict[str, list[Any]]:
    """Return the relevance judgments, of which every query needs a positive one."""
    scores = [int(score) for score in table.cells(table.column("score", cure=_QRELS_HEADER), _RELEVANCE)]
    judgments: dict[tuple[str, str], int] = {}
    conflicting = [
        row
        for row, (query, document, score) in enumerate(zip(query_ids, document_ids, scores, strict=True))
        if judgments.setdefault((query, document), score) != score
    ]
    table.reject(conflicting, lambda _: "the same query and document have another score above")
    answered = {query for (query, _), score in judgments.items() if score > 0}
    table.reject(
        [row for row, query in enumerate(query_ids) if query not in answered],
        lambda row: f"every query must have a document whose `score` is 1 or more, but {query_ids[row]!r} has none",
    )
    return as_columns(_QRELS, [(query, document, score) for (query, document), score in judgments.items()])


def _ids_of(table: Table, name: str, path: Path, ids: Collection[str]) -> list[str]:
    """Return a column of ids as strings, all of which must be in the table of another file."""
    values = [str(value) for value in table.cells(table.column(name, cure=_QRELS_HEADER), _ID)]
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


def _pair_tables(queries: Sequence[str], positives: Sequence[Sequence[str]]) -> Tables:
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
    return {
        "corpus": {"id": list(ids.values()), "title": [""] * len(ids), "text": list(ids)},
        "queries": {"id": list(names.values()), "text": list(names)},
        "qrels": as_columns(_QRELS, judged),
    }


def _finds_itself(tables: Tables) -> bool:
    """Return True if queries are documents with the same id, so that a search must not count the query itself.

    If a query and a document with different texts share an id, the ids are arbitrary numbers. If a query's own document
    is judged relevant, the search must find it.
    """
    corpus, queries = tables["corpus"], tables["queries"]
    if any(query == document and score > 0 for query, document, score in zip(*tables["qrels"].values(), strict=True)):
        return False
    documents = {
        name: {text.strip(), f"{title} {text}".strip()}
        for name, title, text in zip(corpus["id"], corpus["title"], corpus["text"], strict=True)
    }
    shared = [pair for pair in zip(queries["id"], queries["text"], strict=True) if pair[0] in documents]
    return bool(shared) and all(text.strip() in documents[name] for name, text in shared)


def task_type(table: Table) -> TaskType | None:
    """Return the first type whose columns are all present."""
    columns = table.columns
    for name, accepted in _COLUMNS.items():
        # Beside other columns, texts without labels may have labels under another name, which would be lost.
        is_alone = name != "Unlabeled" or len(columns) == 1
        if is_alone and all(set(columns) & set(names.split()) for names, _ in accepted.values()):
            return name
    return None


def column_cure(table: Table, *, labels: bool = True) -> str:
    """Return which columns to name if they look like texts and, with ``labels``, like labels; otherwise ``""``."""
    rows = table.rows[:_GUESSED_ROWS]
    value = next((name for name in table.columns if any(row.get(name) == name for row in rows)), None)
    if value is not None:
        return (
            f"{value!r} is also a value of its column: if the first line is a row, insert a line above it with names "
            "such as text and label."
        )
    lengths = {
        name: fmean(len(value) if isinstance(value := row.get(name), str) else 0 for row in rows)
        for name in table.columns
    }
    text, *others = sorted(lengths, key=lambda name: (name == "text", lengths[name]), reverse=True)
    num_values = {name: len({repr(row.get(name)) for row in rows}) for name in others}
    label = min(num_values, key=lambda name: num_values[name], default="")
    is_label = len(others) == 1 or 2 <= num_values.get(label, 0) <= len(rows) / 2
    found = {"text": text, **({"label": label} if is_label and labels else {})}
    renamed = {column: name for column, name in found.items() if column != name}
    has_other_texts = any(2 * lengths[name] > lengths[text] for name in others if name not in found.values())
    if has_other_texts or not renamed or not lengths[text] or "sentence1" in table.columns:
        return ""
    holds = " and ".join(f"{name} holds the {column}s" for column, name in renamed.items())
    python = ", ".join(f"{column}_column={name!r}" for column, name in renamed.items())
    flags = " ".join(f"--{column}-column {shell_path(name)}" for column, name in renamed.items())
    return f"If {holds}, pass {python} ({flags})."


def _checked(table: Table, task_type: TaskType) -> dict[str, list[Any]]:
    """Return the columns of ``task_type`` under mteb's names, after validating every row."""
    accepted = _COLUMNS[task_type].values()
    rules = {table.column(*names.split(), purpose=f" to be a {task_type}"): rule for names, rule in accepted}
    table = table.complete(*rules)
    columns = {}
    for name, values in zip(_COLUMNS[task_type], table.checked(rules), strict=True):
        if (task_type, name) == ("Retrieval", "positive"):
            values = [[value] if isinstance(value, str) else value for value in values]
        numbers = bool if name == "score" else bool | float
        columns[name] = [int(value) if isinstance(value, numbers) else value for value in values]
    _check_whole(table, task_type, columns=columns)
    return columns


def _check_whole(table: Table, task_type: TaskType, *, columns: Mapping[str, list[Any]]) -> None:
    """Validate what spans several rows: classes, grades, and passages that are both positive and negative."""
    if task_type == "Reranking":
        positives, negatives = columns["positive"], columns["negative"]
        both = [set(right).intersection(wrong) for right, wrong in zip(positives, negatives, strict=True)]
        table.reject(
            [row for row, texts in enumerate(both) if texts],
            lambda row: f"a passage must not be both positive and negative: {min(both[row])[:60]!r}",
        )
    if task_type == "STS":
        table.check_distinct(columns["score"], "scores")
    for name in {"label", "labels"} & columns.keys():
        table.check_distinct(columns[name], "labels")


def _halves(columns: Mapping[str, list[Any]], path: Path) -> Tables:
    """Return a train half and a test half in which every label has about the same share."""
    from sklearn.model_selection import train_test_split

    if rare := [label for label, count in Counter(columns["label"]).items() if count < 2]:
        raise TaskFileError(
            f"{path} must have every label twice or more, to be split in train and test, but has one row of "
            f"{', '.join(map(repr, rare[:5]))}. Add rows, or give train and test rows."
        )
    labels = columns["label"]
    halves = train_test_split(range(len(labels)), test_size=0.5, stratify=labels, random_state=_SPLIT_SEED)
    return {
        split: {name: [values[number] for number in sorted(half)] for name, values in columns.items()}
        for split, half in zip(("train", "test"), halves, strict=True)
    }


def _numbered(splits: Tables, column: str, *, path: Path) -> Tables:
    """Return the splits with labels as sorted numbers, which mteb's scores of two classes need."""
    labels_by_split = {split: set(rows[column]) for split, rows in splits.items()}
    labels = set().union(*labels_by_split.values())
    unseen = labels_by_split["test"] - labels_by_split.get("train", labels_by_split["test"])
    if unseen:
        raise TaskFileError(
            f"{path} must have every label of its test rows among its train rows, but these are only in test: "
            f"{', '.join(sorted(map(repr, unseen))[:5])}."
        )
    numbers = {label: number for number, label in enumerate(sorted(labels))}
    return {split: {**rows, column: [numbers[label] for label in rows[column]]} for split, rows in splits.items()}
