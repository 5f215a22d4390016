"""What a task's data holds, before anything is embedded: rows, repeated rows, leaks, and how its labels are spread."""

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
    """What a task's data holds.

    Attributes:
        name: of the task, without its digest.
        type: what it is taken for.
        why: by which columns or files.
        rows: in each split, or of ``queries``, ``documents`` and ``relevant pairs``.
        duplicates: rows that repeat an earlier one of the same split; splits without any are left out.
        leaks: how many rows give their answer away, by what they do; empty where none does.
        balance: how labels, grades or relevant documents are spread.
        note: what was done to the rows that their owner should know.
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
    """Return what a task's data holds; it is loaded where it was not.

    Args:
        source: of the task.
        task: made by it; ``None`` for texts without labels.
    """
    if task is None:
        assert isinstance(source, TextsSource)
        texts = source.texts()
        return TaskOverview(
            name=task_label(source.name), type="Unlabeled", why=source.why, rows={"texts": len(texts)},
            duplicates=_some({"texts": len(texts) - len(set(texts))}),
        )  # fmt: skip
    from mteb.abstasks import AbsTaskRetrieval

    if not task.data_loaded:
        task.load_data()
    data = getattr(task, "data", None)  # of a local task
    known: dict[str, Any] = {
        "name": task_label(source.name),
        "type": str(task.metadata.type),
        "why": getattr(data, "why", "") or ("built in" if data is not None else "a task of mteb"),
        "note": getattr(data, "note", ""),
    }
    found = _ranked(task) if isinstance(task, AbsTaskRetrieval) else _in_rows(task)
    return TaskOverview(**known, **found)


def _some(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _repeated(rows: Sequence[Any]) -> int:
    return len(rows) - len(set(rows))


def _ranked(task: Any) -> dict[str, Any]:
    """Return what is known of queries and documents."""
    rows, duplicates, leaks = Counter[str](), Counter[str](), Counter[str]()
    relevant: list[int] = []
    for split in (split for subset in task.dataset.values() for name, split in subset.items()):
        corpus = split["corpus"]
        texts = [text or "" for text in corpus["text"][:]]
        titles = corpus["title"][:] if "title" in corpus.column_names else [""] * len(texts)
        documents = [f"{title or ''} {text}".strip() for title, text in zip(titles, texts, strict=True)]
        judged = split["relevant_docs"]
        asked = [
            (name, text)
            for name, text in zip(split["queries"]["id"][:], split["queries"]["text"][:], strict=True)
            if name in judged and isinstance(text, str)
        ]
        queries = [text for _, text in asked]
        counts = [sum(score > 0 for score in found.values()) for found in judged.values()]
        relevant += counts
        rows.update({"queries": len(queries), "documents": len(documents), "relevant pairs": sum(counts)})
        duplicates.update({"queries": _repeated(queries), "documents": _repeated(documents)})
        known: dict[str, set[str]] = {}  # the ids of documents, by their text
        for name, *words in zip(corpus["id"][:], documents, texts, strict=True):
            for one in words:
                known.setdefault(one, set()).add(name)
        own = bool(getattr(task, "ignore_identical_ids", False))  # of a query, does not count as found
        leaks["queries that are also documents"] += sum(
            bool(known.get(text, set()) - ({name} if own else set())) for name, text in asked
        )
    spread = {"fewest": min(relevant), "most": max(relevant), "mean": sum(relevant) / len(relevant)} if relevant else {}
    return {
        "rows": dict(rows), "duplicates": _some(duplicates), "leaks": _some(leaks),
        "balance": {f"relevant documents of a query, {name}": value for name, value in spread.items()},
    }  # fmt: skip


def _in_rows(task: Any) -> dict[str, Any]:
    """Return what is known of a task whose splits are tables of texts and labels or grades."""
    from midlayer_encoders.tasks.mteb_internals import content_columns

    splits, texts = dict(_splits(task)), sorted(content_columns(task))
    inputs = {
        name: list(zip(*(split[column][:] for column in texts if column in split.column_names), strict=True))
        for name, split in splits.items()
    }
    leaks = Counter[str]()
    for name, rows in inputs.items():
        leaks["pairs of a text with itself"] += sum(len(row) == 2 and row[0] == row[1] for row in rows)
        home = name.removesuffix(name.rpartition("/")[2])
        train = home + str(getattr(task, "train_split", None))
        if train in inputs and name != train:
            learned = set(inputs[train])
            leaks[f"{name} texts that are also in {train}"] += sum(row in learned for row in rows)
    return {
        "rows": {name: len(rows) for name, rows in inputs.items()},
        "duplicates": _some({name: _repeated(rows) for name, rows in inputs.items()}),
        "leaks": _some(leaks), "balance": _balance(task, splits),
    }  # fmt: skip


def _splits(task: Any) -> Iterator[tuple[str, Any]]:
    """Yield the splits that are used, by name, those of several subsets under the subset's name too."""
    wanted = {*task.eval_splits, getattr(task, "train_split", None)}
    for name, found in task.dataset.items():
        if hasattr(found, "column_names") and isinstance(found.column_names, list):
            if name in wanted:
                yield name, found
        elif name in task.hf_subsets:
            yield from ((f"{name}/{split}", rows) for split, rows in found.items() if split in wanted)


def _balance(task: Any, splits: Mapping[str, Any]) -> dict[str, float]:
    """Return how the labels, or the grades, of all splits are spread."""
    columns = (getattr(task, "label_column_name", None), "labels", "label", "score")
    column = next((one for one in columns if one and any(one in split.column_names for split in splits.values())), None)
    if column is None:
        return {}
    values = [value for split in splits.values() if column in split.column_names for value in split[column][:]]
    if column == "score":
        return {"lowest score": float(min(values)), "highest score": float(max(values))}
    labels = Counter(str(label) for value in values for label in (value if isinstance(value, list) else [value]))
    counts = labels.values()
    return {
        "labels": len(labels), "rarest, share of rows": min(counts) / len(values),
        "commonest, share of rows": max(counts) / len(values),
    }  # fmt: skip
