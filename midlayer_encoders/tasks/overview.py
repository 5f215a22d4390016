"""A summary of a task's data before anything is embedded: rows, duplicates, leaks and label balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from midlayer_encoders.tasks.sources import TaskSource, TextsSource
from midlayer_encoders.tasks.task_data import task_label

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask


@dataclass(frozen=True, kw_only=True)
class TaskOverview:
    """A summary of a task's data.

    Attributes:
        name: name of the task without its digest.
        type: type of the task.
        why: the reason for this type, such as the names of the columns.
        rows: number of rows by split, or of ``queries``, ``documents`` and ``relevant pairs``.
        duplicates: number of rows that repeat an earlier row of the same split, for splits with duplicates.
        leaks: number of rows that reveal their answer, by kind of leak.
        balance: distribution of labels, grades or relevant documents.
        note: changes to the rows that their owner should know about.
    """

    name: str
    type: str
    why: str
    rows: Mapping[str, int]
    duplicates: Mapping[str, int] = field(default_factory=dict)
    leaks: Mapping[str, int] = field(default_factory=dict)
    balance: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def task_overview(source: TaskSource, task: AbsTask | None) -> TaskOverview:
    """Return a summary of a task's data, which is loaded if necessary.

    Args:
        source: source of the task.
        task: the task from ``source``; ``None`` for texts without labels.
    """
    if task is None:
        assert isinstance(source, TextsSource)
        texts = source.texts()
        return TaskOverview(
            name=task_label(source.name),
            type="Unlabeled",
            why=source.why,
            rows={"texts": len(texts)},
            duplicates=_nonzero({"texts": _num_repeated(texts)}),
        )
    from mteb.abstasks import AbsTaskRetrieval

    if not task.data_loaded:
        task.load_data()
    data = getattr(task, "data", None)  # only local tasks have it
    statistics = _retrieval_statistics(task) if isinstance(task, AbsTaskRetrieval) else _row_statistics(task)
    return TaskOverview(
        name=task_label(source.name),
        type=str(task.metadata.type),
        why=getattr(data, "why", "") or ("built in" if data is not None else "a task of mteb"),
        note=getattr(data, "note", ""),
        **statistics,
    )


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _num_repeated(rows: Sequence[Any]) -> int:
    return len(rows) - len(set(rows))


def _retrieval_statistics(task: Any) -> dict[str, Any]:
    """Return the statistics of queries and documents."""
    rows = Counter[str]()
    duplicates = Counter[str]()
    leaks = Counter[str]()
    relevant: list[int] = []
    for split in (split for subset in task.dataset.values() for split in subset.values()):
        corpus = split["corpus"]
        texts = [text or "" for text in corpus["text"][:]]
        titles = corpus["title"][:] if "title" in corpus.column_names else [""] * len(texts)
        documents = [f"{title or ''} {text}".strip() for title, text in zip(titles, texts, strict=True)]
        judged = split["relevant_docs"]
        all_queries = zip(split["queries"]["id"][:], split["queries"]["text"][:], strict=True)
        queries = {name: text for name, text in all_queries if name in judged and isinstance(text, str)}
        counts = [sum(score > 0 for score in scores.values()) for scores in judged.values()]
        relevant += counts
        rows.update({"queries": len(queries), "documents": len(documents), "relevant pairs": sum(counts)})
        duplicates.update({"queries": _num_repeated([*queries.values()]), "documents": _num_repeated(documents)})
        ids_by_text: dict[str, set[str]] = {}
        for name, *both in zip(corpus["id"][:], documents, texts, strict=True):
            for text in both:
                ids_by_text.setdefault(text, set()).add(name)
        ignores_itself = bool(getattr(task, "ignore_identical_ids", False))
        leaks["queries that are also documents"] += sum(
            bool(ids_by_text.get(text, set()) - {name if ignores_itself else None}) for name, text in queries.items()
        )
    spread = {"fewest": min(relevant), "most": max(relevant), "mean": sum(relevant) / len(relevant)} if relevant else {}
    return {
        "rows": dict(rows),
        "duplicates": _nonzero(duplicates),
        "leaks": _nonzero(leaks),
        "balance": {f"relevant documents of a query, {name}": value for name, value in spread.items()},
    }


def _row_statistics(task: Any) -> dict[str, Any]:
    """Return the statistics of a task whose splits are tables of texts and labels or grades."""
    from midlayer_encoders.tasks.mteb_internals import content_columns

    splits = dict(_used_splits(task))
    text_columns = sorted(content_columns(task))
    inputs = {
        name: list(zip(*(split[column][:] for column in text_columns if column in split.column_names), strict=True))
        for name, split in splits.items()
    }
    leaks = Counter[str]()
    for name, rows in inputs.items():
        leaks["pairs of a text with itself"] += sum(len(row) == 2 and row[0] == row[1] for row in rows)
        subset = name.removesuffix(name.rpartition("/")[2])
        train = subset + str(getattr(task, "train_split", None))
        if train in inputs and name != train:
            training_rows = set(inputs[train])
            leaks[f"{name} texts that are also in {train}"] += sum(row in training_rows for row in rows)
    return {
        "rows": {name: len(rows) for name, rows in inputs.items()},
        "duplicates": _nonzero({name: _num_repeated(rows) for name, rows in inputs.items()}),
        "leaks": _nonzero(leaks),
        "balance": _balance(task, splits),
    }


def _used_splits(task: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and tables of the used splits; a subset's name precedes its splits' names."""
    names = {*task.eval_splits, getattr(task, "train_split", None)}
    for name, dataset in task.dataset.items():
        if hasattr(dataset, "column_names") and isinstance(dataset.column_names, list):
            if name in names:
                yield name, dataset
        elif name in task.hf_subsets:
            yield from ((f"{name}/{split}", rows) for split, rows in dataset.items() if split in names)


def _balance(task: Any, splits: Mapping[str, Any]) -> dict[str, float]:
    """Return the distribution of the labels or grades of all splits."""
    candidates = (getattr(task, "label_column_name", None), "labels", "label", "score")
    available = {name for split in splits.values() for name in split.column_names}
    column = next((name for name in candidates if name in available), None)
    if column is None:
        return {}
    values = [value for split in splits.values() if column in split.column_names for value in split[column][:]]
    if column == "score":
        return {"lowest score": float(min(values)), "highest score": float(max(values))}
    labels = Counter(str(label) for value in values for label in (value if isinstance(value, list) else [value]))
    counts = labels.values()
    return {
        "labels": len(labels),
        "rarest, share of rows": min(counts) / len(values),
        "commonest, share of rows": max(counts) / len(values),
    }
