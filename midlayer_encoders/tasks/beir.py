"""Retrieval out of your own files: a folder in BEIR's layout, or rows of queries and their passages."""

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
_MAYBE: Rule = (
    "a string",
    lambda value: value is None or (isinstance(value, str) and lone_surrogate(value) is None),
)
_MOST_RELEVANT = 1_000_000  # trec_eval counts every grade up to the highest: of 1e9 it runs out of memory and returns 0
_RELEVANCE: Rule = (
    f"a whole number, 1 or more for what is relevant, {_MOST_RELEVANT} at most",
    lambda value: is_score(value) and value == int(value) and abs(value) <= _MOST_RELEVANT,  # type: ignore[call-overload, arg-type]
)


def beir_files(path: Path, *, asked: bool) -> dict[str, Path] | None:
    """Return the files of a folder in BEIR's layout: ``corpus``, ``queries``, ``qrels``; ``None`` where it is another.

    Args:
        path: of the folder.
        asked: the folder is said to be a retrieval task; else two of the three show it, where there is no ``test.*``.
    """
    top = _by_stem(path)
    qrels = path / "qrels"
    found = [name for name in ("corpus", "queries") if name in top] + (["qrels"] if qrels.is_dir() else [])
    if "test" in top or len(found) < (1 if asked else 2):
        return None
    layout = "corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR does"
    for name in ("corpus", "queries", "qrels"):
        if name not in found:
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
    return {"corpus": _alone(top["corpus"]), "queries": _alone(top["queries"]), "qrels": _alone(judged["test"])}


def _by_stem(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix.lower() in SUFFIXES}


def _alone(file: Path) -> Path:
    """Return a file, or raise where its folder has another of the same name: either could be meant."""
    same = [
        one.name for one in sorted(file.parent.iterdir()) if one.stem == file.stem and one.suffix.lower() in SUFFIXES
    ]
    if len(same) > 1:
        raise TaskFileError(
            f"{file.parent} must hold one file of each name, but has {' and '.join(same)}: remove all but one."
        )
    return file


def beir_tables(files: Mapping[str, Path]) -> Tables:
    """Return what the files of :func:`beir_files` hold, with the queries that ``qrels`` judges alone.

    Raises:
        TaskFileError: naming the file, the lines and what they must be.
    """
    corpus, queries, qrels = (read_table(files[name]) for name in ("corpus", "queries", "qrels"))
    documents = _ids(corpus, _column(corpus, _IDS))
    titles = [title or "" for title in corpus.cells("title", _MAYBE)]
    texts = [text or "" for text in corpus.cells(_column(corpus, ("text",)), _MAYBE)]
    blank = [number for number, words in enumerate(zip(titles, texts, strict=True)) if not "".join(words).strip()]
    if blank:
        raise TaskFileError(corpus.complaint(blank, "`text` must be a string that is not empty, unless `title` is"))
    names = _ids(queries, _column(queries, _IDS))
    asked = dict(zip(names, queries.cells(_column(queries, ("text",)), _TEXT), strict=True))
    judged = _judged(qrels, queries=(queries.path, asked), corpus=(corpus.path, set(documents)))
    answered = set(judged["query-id"])
    kept = [name for name in names if name in answered]
    return {
        "corpus": {"id": documents, "title": titles, "text": texts},
        "queries": {"id": kept, "text": [asked[name] for name in kept]},
        "qrels": judged,
    }


def _judged(
    table: Table, *, queries: tuple[Path, Mapping[str, str]], corpus: tuple[Path, set[str]]
) -> dict[str, list[Any]]:
    """Return who is relevant to what, every line of it about a query and a document that are there."""
    columns = [
        [str(value) for value in table.cells(_column(table, (name,)), _ID)] for name in ("query-id", "corpus-id")
    ]
    scores = [int(score) for score in table.cells(_column(table, ("score",)), _RELEVANCE)]
    for name, values, (path, known) in zip(("query-id", "corpus-id"), columns, (queries, corpus), strict=True):
        bad = [number for number, value in enumerate(values) if value not in known]
        if bad:
            raise TaskFileError(
                table.complaint(bad, f"`{name}` must be an id of {path.name}, but there is no {values[bad[0]]!r}")
            )
    said: dict[tuple[str, str], int] = {}
    other = [
        number
        for number, (query, document, score) in enumerate(zip(*columns, scores, strict=True))
        if said.setdefault((query, document), score) != score
    ]
    if other:
        raise TaskFileError(table.complaint(other, "the same query and document have another score above"))
    answered = {query for (query, _), score in said.items() if score > 0}
    without = [number for number, query in enumerate(columns[0]) if query not in answered]
    if without:
        raise TaskFileError(
            table.complaint(
                without,
                f"every query must have a document whose `score` is 1 or more, but {columns[0][without[0]]!r} has none",
            )
        )
    return {
        "query-id": [query for query, _ in said],
        "corpus-id": [document for _, document in said],
        "score": list(said.values()),
    }


def _column(table: Table, names: Sequence[str]) -> str:
    """Return the first of some columns that a table has."""
    found = next((name for name in names if name in table.columns), None)
    if found is None:
        first = " Its first line must name the columns: query-id, corpus-id, score." if "-id" in names[0] else ""
        raise TaskFileError(
            f"{table.path} must have the column {' or '.join(names)}, but has {', '.join(table.columns)}.{first}"
        )
    return found


def _ids(table: Table, name: str) -> list[str]:
    """Return ids as strings, no two alike."""
    values = [str(value) for value in table.cells(name, _ID)]
    first: dict[str, int] = {}
    again = [number for number, value in enumerate(values) if first.setdefault(value, number) != number]
    if again:
        value = values[again[0]]
        place = f"{table.unit} {table.numbers[first[value]]}"
        raise TaskFileError(table.complaint(again, f"`{name}` must not repeat, but {value!r} is in {place} too"))
    return values


def pair_tables(queries: Sequence[str], positives: Sequence[Sequence[str]]) -> Tables:
    """Return queries and their passages as a retrieval task: the corpus is every distinct passage.

    Rows of one query are one query with all of their passages, or what one row holds would be wrong in the other.
    """
    right: dict[str, set[str]] = {}
    for query, texts in zip(queries, positives, strict=True):
        right.setdefault(query, set()).update(texts)
    # Equal similarities are ranked by id: numbers that do not know which passage is right.
    ids = {text: f"d{number:09}" for number, text in enumerate(sorted(set().union(*right.values())))}
    names = {query: f"q{number}" for number, query in enumerate(right)}
    judged = [(names[query], ids[text]) for query, texts in right.items() for text in sorted(texts)]
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
    """Return whether queries are documents themselves, under one id, so that finding themselves must not count.

    Where an id is shared by a query and a document of another text, ids are numbers that mean nothing. Where a query's
    own document is judged relevant, it is to be found.
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
