"""Retrieval tasks from your own files: a folder in BEIR's layout, or rows of queries and passages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from midlayer_encoders.tasks.table_files import SUFFIXES, Rule, Table, TaskFileError, is_score, is_text, read_table
from midlayer_encoders.validation import lone_surrogate

Tables: TypeAlias = dict[str, dict[str, list[Any]]]
"""``corpus`` (``id, title, text``), ``queries`` (``id, text``) and ``qrels`` (``query-id, corpus-id, score``)."""

_IDS = ("_id", "id")
_ID: Rule = (
    "an id, a string that is not empty or a whole number",
    lambda value: is_text(value) or (isinstance(value, int) and not isinstance(value, bool)),
)
_TEXT: Rule = ("a string that is not empty", is_text)
_OPTIONAL_TEXT: Rule = (
    "a string",
    lambda value: value is None or (isinstance(value, str) and lone_surrogate(value) is None),
)
_MOST_RELEVANT = 1_000_000  # trec_eval allocates memory for every grade and returns 0 for 1e9
_RELEVANCE: Rule = (
    f"a whole number, 1 or more for what is relevant, {_MOST_RELEVANT} at most",
    lambda value: is_score(value) and value == int(value) and abs(value) <= _MOST_RELEVANT,  # type: ignore[call-overload, arg-type]
)


def beir_files(path: Path, *, is_retrieval: bool) -> dict[str, Path] | None:
    """Return the files ``corpus``, ``queries`` and ``qrels`` of a folder in BEIR's layout, else ``None``.

    Args:
        path: the folder.
        is_retrieval: ``task.json`` declares a retrieval task. Otherwise two of the three files, without ``test.*``,
            identify the layout.
    """
    top = _by_stem(path)
    qrels = path / "qrels"
    present = [name for name in ("corpus", "queries") if name in top] + (["qrels"] if qrels.is_dir() else [])
    if "test" in top or len(present) < (1 if is_retrieval else 2):
        return None
    layout = "corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR does"
    for name in ("corpus", "queries", "qrels"):
        if name not in present:
            lacking = "qrels/" if name == "qrels" else f"{name}.*"
            raise TaskFileError(
                f"{path} must hold {layout}, to be a Retrieval, but has no {lacking}. Add it, or put the rows in a "
                "test.jsonl of query and positive."
            )
    judged = _by_stem(qrels)
    if "test" not in judged:
        has = ", ".join(file.name for file in judged.values()) or "no such file"
        cure = "Rename the one to score on to test" if judged else "Add it"
        raise TaskFileError(f"{qrels} must hold test.tsv, which says what is relevant, but holds {has}. {cure}.")
    return {
        "corpus": _only_file(top["corpus"]),
        "queries": _only_file(top["queries"]),
        "qrels": _only_file(judged["test"]),
    }


def _by_stem(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES}


def _only_file(file: Path) -> Path:
    """Return a file; raise an error if its folder has another file with the same stem."""
    same = [
        path.name
        for path in sorted(file.parent.iterdir())
        if path.stem == file.stem and path.suffix.lower() in SUFFIXES
    ]
    if len(same) > 1:
        raise TaskFileError(
            f"{file.parent} must hold one file of each name, but has {' and '.join(same)}: remove all but one."
        )
    return file


def beir_tables(files: Mapping[str, Path]) -> Tables:
    """Return the tables of the files from :func:`beir_files`, without queries that ``qrels`` does not judge.

    Raises:
        TaskFileError: for invalid lines.
    """
    corpus, queries, qrels = (read_table(files[name]) for name in ("corpus", "queries", "qrels"))
    documents = _ids(corpus, _column(corpus, _IDS))
    titles = [title or "" for title in corpus.cells("title", _OPTIONAL_TEXT)]
    texts = [text or "" for text in corpus.cells(_column(corpus, ("text",)), _OPTIONAL_TEXT)]
    blank = [number for number, words in enumerate(zip(titles, texts, strict=True)) if not "".join(words).strip()]
    if blank:
        raise TaskFileError(corpus.complaint(blank, "`text` must be a string that is not empty, unless `title` is"))
    names = _ids(queries, _column(queries, _IDS))
    query_texts = dict(zip(names, queries.cells(_column(queries, ("text",)), _TEXT), strict=True))
    judged = _judged(qrels, queries=(queries.path, query_texts), corpus=(corpus.path, set(documents)))
    answered = set(judged["query-id"])
    judged_names = [name for name in names if name in answered]
    return {
        "corpus": {"id": documents, "title": titles, "text": texts},
        "queries": {"id": judged_names, "text": [query_texts[name] for name in judged_names]},
        "qrels": judged,
    }


def _judged(
    table: Table, *, queries: tuple[Path, Mapping[str, str]], corpus: tuple[Path, set[str]]
) -> dict[str, list[Any]]:
    """Return the relevance judgments; every line must name an existing query and document."""
    columns = [
        [str(value) for value in table.cells(_column(table, (name,)), _ID)] for name in ("query-id", "corpus-id")
    ]
    scores = [int(score) for score in table.cells(_column(table, ("score",)), _RELEVANCE)]
    for name, values, (path, ids) in zip(("query-id", "corpus-id"), columns, (queries, corpus), strict=True):
        bad = [number for number, value in enumerate(values) if value not in ids]
        if bad:
            raise TaskFileError(
                table.complaint(bad, f"`{name}` must be an id of {path.name}, but there is no {values[bad[0]]!r}")
            )
    judgments: dict[tuple[str, str], int] = {}
    conflicting = [
        number
        for number, (query, document, score) in enumerate(zip(*columns, scores, strict=True))
        if judgments.setdefault((query, document), score) != score
    ]
    if conflicting:
        raise TaskFileError(table.complaint(conflicting, "the same query and document have another score above"))
    answered = {query for (query, _), score in judgments.items() if score > 0}
    without = [number for number, query in enumerate(columns[0]) if query not in answered]
    if without:
        raise TaskFileError(
            table.complaint(
                without,
                f"every query must have a document whose `score` is 1 or more, but {columns[0][without[0]]!r} has none",
            )
        )
    return {
        "query-id": [query for query, _ in judgments],
        "corpus-id": [document for _, document in judgments],
        "score": list(judgments.values()),
    }


def _column(table: Table, names: Sequence[str]) -> str:
    """Return the first of several columns that a table has."""
    column = next((name for name in names if name in table.columns), None)
    if column is None:
        first = " Its first line must name the columns: query-id, corpus-id, score." if "-id" in names[0] else ""
        raise TaskFileError(
            f"{table.path} must have the column {' or '.join(names)}, but has {', '.join(table.columns)}.{first}"
        )
    return column


def _ids(table: Table, name: str) -> list[str]:
    """Return unique ids as strings."""
    values = [str(value) for value in table.cells(name, _ID)]
    first: dict[str, int] = {}
    repeated = [number for number, value in enumerate(values) if first.setdefault(value, number) != number]
    if repeated:
        value = values[repeated[0]]
        place = f"{table.unit} {table.numbers[first[value]]}"
        raise TaskFileError(table.complaint(repeated, f"`{name}` must not repeat, but {value!r} is in {place} too"))
    return values


def pair_tables(queries: Sequence[str], positives: Sequence[Sequence[str]]) -> Tables:
    """Return queries and their passages as a retrieval task whose corpus is all distinct passages.

    Rows with the same query become one query with all their passages.
    """
    positives_by_query: dict[str, set[str]] = {}
    for query, texts in zip(queries, positives, strict=True):
        positives_by_query.setdefault(query, set()).update(texts)
    # mteb ranks equal similarities by id, which must not depend on which passage is relevant.
    ids = {text: f"d{number:09}" for number, text in enumerate(sorted(set().union(*positives_by_query.values())))}
    names = {query: f"q{number}" for number, query in enumerate(positives_by_query)}
    judged = [(names[query], ids[text]) for query, texts in positives_by_query.items() for text in sorted(texts)]
    return {
        "corpus": {"id": list(ids.values()), "title": [""] * len(ids), "text": list(ids)},
        "queries": {"id": list(names.values()), "text": list(names)},
        "qrels": {
            "query-id": [query for query, _ in judged],
            "corpus-id": [document for _, document in judged],
            "score": [1] * len(judged),
        },
    }


def finds_itself(tables: Tables) -> bool:
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
