"""Local tasks: mteb's evaluations on rows in memory.

This module imports mteb, which takes seconds: import it inside functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from datasets import Dataset, DatasetDict
from mteb import abstasks
from mteb.abstasks.task_metadata import TaskMetadata

from midlayer_encoders.tasks.task_data import TaskData, TaskType


class _LocalTask(abstasks.AbsTask):
    """A task whose rows are in memory; ``load_data`` downloads nothing."""

    _main_score: ClassVar[str] = "accuracy"

    def __init__(self, data: TaskData) -> None:
        self.data = data
        self.metadata = TaskMetadata(
            name=data.name,
            description=data.description,
            type=data.type,  # type: ignore[arg-type]  # there is no task of type "Unlabeled"
            dataset={"path": f"local/{data.label}", "revision": data.revision},
            category="t2c" if data.type in ("Classification", "Clustering") else "t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score=self._main_score,
        )
        for setting, value in data.settings.items():
            setattr(self, setting, value)
        super().__init__()

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Create the datasets that mteb reads."""
        if not self.data_loaded:
            self.dataset = self._datasets()
            self.data_loaded = True

    def unload_data(self) -> None:
        """Drop the datasets but not the metadata, which mteb's version also drops."""
        self.dataset = None
        self.data_loaded = False

    def _datasets(self) -> Any:
        return DatasetDict({split: Dataset.from_dict(dict(rows)) for split, rows in self.data.splits.items()})


class _Classification(_LocalTask, abstasks.AbsTaskClassification):
    pass


class _Clustering(_LocalTask, abstasks.AbsTaskClustering):
    _main_score = "v_measure"
    max_fraction_of_documents_to_embed = None  # mteb's default is 4 %


class _PairClassification(_LocalTask, abstasks.AbsTaskPairClassification):
    _main_score = "max_ap"


class _STS(_LocalTask, abstasks.AbsTaskSTS):
    _main_score = "cosine_spearman"

    def __init__(self, data: TaskData) -> None:
        scores = data.splits["test"]["score"]
        self.min_score, self.max_score = min(scores), max(scores)
        super().__init__(data)


class _Reranking(_LocalTask, abstasks.AbsTaskRetrieval):
    _main_score = "map_at_1000"

    def _datasets(self) -> dict[str, dict[str, Any]]:
        return {"default": {split: _candidates(rows) for split, rows in self.data.splits.items()}}


class _Retrieval(_LocalTask, abstasks.AbsTaskRetrieval):
    _main_score = "ndcg_at_10"

    def _datasets(self) -> dict[str, dict[str, Any]]:
        tables = self.data.splits
        relevant: dict[str, dict[str, int]] = {}
        for query, document, score in zip(*tables["qrels"].values(), strict=True):
            relevant.setdefault(query, {})[document] = score
        queries, corpus = (Dataset.from_dict(dict(tables[name])) for name in ("queries", "corpus"))
        split = {"queries": queries, "corpus": corpus, "relevant_docs": relevant, "top_ranked": None}
        return {"default": {"test": split}}


def _candidates(rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the rows in mteb's retrieval format: a corpus of distinct passages, and the candidates of each query."""
    passages = {text for column in ("positive", "negative") for texts in rows[column] for text in texts}
    # mteb ranks equal similarities by id or position, which must not depend on which passage is relevant.
    ids = {text: f"d{number:09}" for number, text in enumerate(sorted(passages))}
    queries = [f"q{number}" for number in range(len(rows["query"]))]
    positives = [sorted({ids[text] for text in texts}) for texts in rows["positive"]]
    negatives = [sorted({ids[text] for text in texts}) for texts in rows["negative"]]
    return {
        "queries": Dataset.from_dict({"id": queries, "text": list(rows["query"])}),
        "corpus": Dataset.from_dict({"id": list(ids.values()), "title": [""] * len(ids), "text": list(ids)}),
        "relevant_docs": {
            query: dict.fromkeys(documents, 1) for query, documents in zip(queries, positives, strict=True)
        },
        "top_ranked": {query: sorted(a + b) for query, a, b in zip(queries, positives, negatives, strict=True)},
    }


TASK_CLASSES: dict[TaskType, type[_LocalTask]] = {
    "Classification": _Classification,
    "Clustering": _Clustering,
    "PairClassification": _PairClassification,
    "Reranking": _Reranking,
    "STS": _STS,
    "Retrieval": _Retrieval,
}
