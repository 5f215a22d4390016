"""mteb tasks whose data is a sample.

The sample depends on the rows' numbers, labels and ids only, so every process draws the same one, and a sample contains
every smaller one. This module imports mteb, which takes seconds: import it inside functions.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from datasets import Dataset
from mteb import abstasks
from mteb.abstasks import AbsTask

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks.mteb_internals import content_columns
from midlayer_encoders.tasks.task_data import whole_name

#: Documents of a sampled corpus for each query of the limit, besides the relevant ones.
DOCUMENTS_PER_QUERY = 20

_BINS = 10  # of equal size, for scores
_FEWEST_STRATA = 3  # in every sample: with one label there is no score, and mteb scores two labels in another way

_Rows = dict[str, tuple[int, int, int]]


class _Sampled(AbsTask):
    """A task that keeps a sample of its data after loading it."""

    row_limit: int
    _sampled_rows: _Rows
    _most_documents: int | None = None  # that mteb clusters
    _share_of_documents: float | None = None

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        """Load the data and keep the sample."""
        if not self.data_loaded:
            super().load_data(*args, **kwargs)
            self.keep_sample()

    def keep_sample(self) -> None:
        """Replace the data by the sample, without changing it in place."""
        if isinstance(self, abstasks.AbsTaskRetrieval):
            self.convert_v1_dataset_format_to_v2(num_proc=None)
        if self.metadata.type == "InstructionReranking" or not isinstance(self.dataset, Mapping):
            raise OptionError(
                f"`limit` does not apply to {whole_name(self.metadata.name)}: tasks of the type "
                f"{self.metadata.type} cannot be sampled."
            )
        self.dataset = self._sample(self.dataset)

    def _sample(self, data: Any, prefix: str = "") -> Any:
        """Return the sampled splits of a subset, or of all subsets."""
        splits = {*self.eval_splits, getattr(self, "train_split", None)}
        sampled = dict(data)
        for name, part in data.items():
            if isinstance(part, Dataset):
                if name in splits:
                    sampled[name] = self._sampled_table(part, name, prefix + name)
            elif "relevant_docs" in part:
                if name in splits:
                    sampled[name] = self._sampled_search(part, prefix)
            elif name in self.hf_subsets:
                sampled[name] = self._sample(part, f"{name} " if len(self.hf_subsets) > 1 else "")
        return type(data)(sampled)

    def _sampled_table(self, table: Dataset, split: str, name: str) -> Dataset:
        column = getattr(self, "label_column_name", "score")
        if isinstance(self, abstasks.AbsTaskPairClassification) and len(table) == 1:  # all pairs in one row
            table = Dataset.from_dict(table[0])
        values: list[Any] = table[column][:] if column in table.column_names else [""] * len(table)
        if isinstance(self, abstasks.AbsTaskClusteringLegacy) and isinstance(values[0], list):
            return self._sampled_sets(table, values, name)
        count, total = self.row_limit, len(table)
        most_read = total
        labels = [list(map(str, value)) if isinstance(value, list) else [str(value)] for value in values]
        if column == "score" or isinstance(self, abstasks.AbsTaskRegression):
            labels = [[score] for score in score_bins(values)]
        order = sample_order([" ".join(sorted(row)) for row in labels])
        if split == getattr(self, "train_split", None):
            if isinstance(self, abstasks.AbsTaskRegression):
                count = max(count, self.n_samples)
            elif isinstance(self, abstasks.AbsTaskClassification):
                order, fewest = training_order(labels, self.samples_per_label)
                count = max(count, fewest)
                num_labels = len({label for row in labels for label in row})
                most_read = self.n_experiments * self.samples_per_label * num_labels  # of which mteb trains
        if self._share_of_documents is not None:
            total = int(self._share_of_documents * total)
        total = min(total, self._most_documents or total)
        texts = len(content_columns(self) & set(table.column_names))
        self._sampled_rows[name] = min(count, total, most_read), min(total, most_read), max(texts, 1)
        return table if min(count, total) == len(table) else table.select(sorted(order[: min(count, total)]))

    def _sampled_sets(self, table: Dataset, labels: list[list[Any]], name: str) -> Dataset:
        """Return the sets of a clustering task with some of their texts, in proportion to sets and labels."""
        column, label_column = self.input_column_name, self.label_column_name  # type: ignore[attr-defined]
        places = [(number, item) for number, part in enumerate(labels) for item in range(len(part))]
        order = sample_order([f"{number} {labels[number][item]}" for number, item in places])
        self._sampled_rows[name] = min(self.row_limit, len(places)), len(places), 1
        if self.row_limit >= len(places):
            return table
        kept: dict[int, list[int]] = {}
        for place in sorted(order[: self.row_limit]):
            number, item = places[place]
            kept.setdefault(number, []).append(item)
        inputs = table[column][:]
        columns = {column: inputs, label_column: labels}
        return Dataset.from_dict(
            {key: [[cells[n][item] for item in items] for n, items in kept.items()] for key, cells in columns.items()}
        )

    def _sampled_search(self, split: Any, prefix: str) -> Any:
        """Return some queries with all their relevant documents and candidates, and some of the other documents."""
        judged, candidates, corpus = split["relevant_docs"], split.get("top_ranked"), split["corpus"]
        queries = [query for query in split["queries"]["id"][:] if judged.get(query)]
        kept = sampled_ids(queries, self.row_limit)
        documents = {document for query in kept for document, score in judged[query].items() if score > 0}
        ids = corpus["id"][:]
        if candidates:
            documents |= {document for query in kept for document in candidates.get(query, ())}
            total = len({document for query in queries for document in (*judged[query], *candidates.get(query, ()))})
        else:
            documents |= sampled_ids(ids, DOCUMENTS_PER_QUERY * self.row_limit)
            total = len(ids)
        documents &= set(ids)
        self._sampled_rows[f"{prefix}queries"] = len(kept), len(queries), 1
        self._sampled_rows[f"{prefix}documents"] = len(documents), total, 1
        if len(kept) == len(queries) and len(documents) == len(ids):
            return split
        return {
            **split,
            "queries": _with_ids(split["queries"], kept),
            "corpus": _with_ids(corpus, documents),
            "relevant_docs": {
                query: {document: score for document, score in scores.items() if document in documents}
                for query, scores in judged.items()
                if query in kept
            },
            "top_ranked": candidates and {query: found for query, found in candidates.items() if query in kept},
        }


def _with_ids(table: Dataset, ids: set[str]) -> Dataset:
    return table.select([row for row, name in enumerate(table["id"][:]) if name in ids])


def sampled_task(task: AbsTask, name: str, limit: int, rows: _Rows) -> AbsTask:
    """Turn a task into one under another name whose data is a sample, and return it.

    Args:
        task: a new task, which changes; data that is already loaded does not.
        name: new name.
        limit: rows of each split.
        rows: filled by split, when the data is loaded, as in
            :class:`~midlayer_encoders.tasks.sources.SampledSource`.
    """
    task.__class__ = _sampled_class(type(task))
    task.metadata = task.metadata.model_copy(update={"name": name})
    sampled: Any = task
    sampled.row_limit, sampled._sampled_rows = limit, rows
    if isinstance(task, abstasks.AbsTaskClustering):  # the sample replaces mteb's draw, by default 4 % of the rows
        sampled._most_documents, task.max_document_to_embed = task.max_document_to_embed, None
        sampled._share_of_documents = task.max_fraction_of_documents_to_embed
        task.max_fraction_of_documents_to_embed = None
    if task.data_loaded:
        sampled.keep_sample()
    return task


def sampled_rows(task: Any) -> _Rows:
    """Return the counts of a sampled task whose data is loaded."""
    return task._sampled_rows  # type: ignore[no-any-return]


@cache
def _sampled_class(task_class: type[AbsTask]) -> type[AbsTask]:
    return type(task_class.__name__, (_Sampled, task_class), {})


def sample_order(strata: Sequence[str]) -> list[int]:
    """Return all rows in an order whose every beginning has each stratum in proportion, to within a row or two.

    The order begins with a row of each of the three largest strata.

    Args:
        strata: the stratum of each row.

    Example:
        >>> order = sample_order(["a"] * 60 + ["b"] * 30 + ["c"] * 10)
        >>> Counter("aaaaaabbbc"[row // 10] for row in order[:10])
        Counter({'a': 6, 'b': 3, 'c': 1})
    """
    members: dict[str, list[int]] = defaultdict(list)
    for row, stratum in enumerate(strata):
        members[stratum].append(row)
    places: list[tuple[float, str, int]] = []
    for stratum, rows in members.items():
        # A start by chance: otherwise all strata of the same size would come at once.
        start = int(_rank(stratum), 16) / 2**64
        ranked = sorted((_rank(row), row) for row in rows)
        places += [((start + number) / len(rows), rank, row) for number, (rank, row) in enumerate(ranked)]
    order = [row for _, _, row in sorted(places)]
    largest = sorted(members, key=lambda stratum: (-len(members[stratum]), stratum))[:_FEWEST_STRATA]
    first = [next(row for row in order if strata[row] == stratum) for stratum in largest]
    return list(dict.fromkeys([*first, *order]))


def training_order(labels: Sequence[Sequence[str]], per_label: int) -> tuple[list[int], int]:
    """Return all rows with ``per_label`` rows of each label first, and the number of these.

    Args:
        labels: the labels of each row, one or several.
        per_label: rows of a label on which a classifier is trained.
    """
    order = sample_order([" ".join(sorted(row)) for row in labels])
    counts = Counter[str]()
    first: list[int] = []
    for row in order:
        if any(counts[label] < per_label for label in labels[row]):
            first.append(row)
            counts.update(labels[row])
    return list(dict.fromkeys([*first, *order])), len(first)


def score_bins(scores: Sequence[float]) -> list[str]:
    """Return the bin of each score, of ten with equal numbers of rows; equal scores share a bin.

    Example:
        >>> score_bins([0.0, 0.0, 1.5, 2.5, 5.0])
        ['0', '0', '4', '6', '8']
    """
    ordered = sorted(scores)
    return [str(_BINS * bisect_left(ordered, score) // len(scores)) for score in scores]


def sampled_ids(ids: Iterable[str], count: int) -> set[str]:
    """Return the first ids in a fixed random order."""
    return set(sorted(ids, key=_rank)[:count])


def _rank(item: int | str) -> str:
    """Return the place of a row, a stratum or an id in a fixed random order."""
    return content_digest(f"{type(item).__name__} {item}", 8)
