"""What mteb asks of an encoder on a task: its own evaluation is run with numbers of rows in place of vectors.

So texts, prompts, splits, subsets, training examples and draws are mteb's own, by its own code. Imports mteb, which
takes seconds: import this module inside functions. What of mteb is private and used here is tested in
``tests/scoring/test_recording.py``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from mteb._create_dataloaders import create_dataloader
from mteb.abstasks import (
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
)
from mteb.abstasks import clustering as mteb_clustering
from mteb.models.model_meta import ModelMeta
from mteb.models.search_wrappers import SearchEncoderWrapper
from mteb.types import PromptType
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.scoring.classification import Classifiers, Experiment
from midlayer_encoders.scoring.clustering import Clusterings, Draws
from midlayer_encoders.scoring.pairs import LabelledPairs
from midlayer_encoders.scoring.retrieval import make_ranking
from midlayer_encoders.scoring.sts import StsPairs

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask
    from mteb.abstasks.task_metadata import TaskMetadata
    from torch.utils.data import DataLoader


class Keys(Protocol):
    """Returns the key of each input that mteb hands to an encoder; whatever embeds them may do so here."""

    def __call__(
        self, inputs: DataLoader[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None
    ) -> Sequence[str]:
        """Return a key for each input."""


class Question(Protocol):
    """What is asked of the vectors of some rows."""

    def scores(self, vectors: Tensor) -> Tensor:
        """Return one score for each layer from vectors ``(L, N, D)``."""

    def numbers(self, rows: int, dim: int) -> int:
        """Return about how many numbers of four bytes a layer takes."""


@dataclass(frozen=True)
class Recorded:
    """A question about one subset of one split of a task, and the keys of the N rows that it is about."""

    split: str
    subset: str
    keys: tuple[str, ...]
    question: Question


def record(task: AbsTask, keys: Keys, *, similarity: str = "cosine") -> list[Recorded]:
    """Return what mteb asks on each subset of each split of a task; the task must be one that is scored together.

    Args:
        task: a fresh one, which is used up.
        keys: of the inputs.
        similarity: the encoder's own, as in sentence-transformers' ``similarity_fn_name``.
    """
    mixin = next(one for base, one in _RECORDING.items() if isinstance(task, base))
    task.__class__ = type(type(task).__name__, (mixin, type(task)), {})
    asked: list[Recorded] = []
    for split in task.eval_splits:
        for subset in task.hf_subsets:
            rows = _Rows(keys, similarity)
            # One subset after the other, with one task: its generator goes on from subset to subset, as in mteb.
            task.evaluate(rows, split, [subset], encode_kwargs={"batch_size": 32, "show_progress_bar": False})
            if rows.question is None:
                raise RuntimeError(f"mteb's evaluation of {task.metadata.name} ended without asking anything.")
            asked.append(Recorded(split, subset, tuple(rows.places), rows.question))
    return asked


@dataclass
class _Rows:
    """An encoder for mteb whose vectors are the numbers of its inputs' rows, ``(N, 1)``; equal inputs share one."""

    keys: Keys
    own: str
    places: dict[str, int] = field(default_factory=dict)
    question: Question | None = None
    mteb_model_meta: ModelMeta = field(
        default_factory=lambda: ModelMeta.create_empty(overwrites={"name": "local/rows", "revision": "none"})
    )

    def encode(
        self,
        inputs: DataLoader[Any],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,  # noqa: ARG002  (mteb names them)
        hf_subset: str,  # noqa: ARG002
        prompt_type: PromptType | None = None,
        **_: Any,
    ) -> npt.NDArray[np.int64]:
        found = self.keys(inputs, task_metadata=task_metadata, prompt_type=prompt_type)
        return np.array([[self.places.setdefault(key, len(self.places))] for key in found], dtype=np.int64)

    def similarity(self, one: Any, other: Any) -> npt.NDArray[np.float32]:
        return np.zeros((len(one), len(other)), dtype=np.float32)

    def similarity_pairwise(self, one: Any, _: Any) -> npt.NDArray[np.float32]:
        return np.zeros(len(one), dtype=np.float32)


def _places(rows: Any) -> Tensor:
    return torch.as_tensor(np.asarray(rows)[:, 0])


def _codes(labels: Sequence[Any], known: Mapping[Any, int]) -> Tensor:
    return torch.tensor([known[label] for label in labels])


class _RecordedPairs(AbsTaskPairClassification):
    """Records both columns of pairs, and the labels."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._columns, self._model = _Columns(model), model
        return super()._evaluate_subset(self._columns, *args, **kwargs)

    def _compute_metrics(self, similarity_scores: Any, labels: Any) -> dict[str, float]:  # noqa: ARG002
        first, second = self._columns.found
        wanted = torch.as_tensor(np.asarray(labels[:], dtype=np.int64))
        known = torch.unique(wanted).tolist()
        if len(known) > 2 or (len(known) == 2 and 1 not in known):  # as scikit-learn, which mteb asks
            raise OptionError(f"Labels of pairs must be 1 for those that belong together, else 0, but are {known[:9]}.")
        main = self.metadata.main_score
        self._model.question = LabelledPairs(first, second, wanted, main, self._model.own)
        return {main: 0.0}


class _RecordedSts(AbsTaskSTS):
    """Records both columns of pairs, and the wanted similarities."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._columns, self._model = _Columns(model), model
        return super()._evaluate_subset(self._columns, *args, **kwargs)

    def _calculate_scores(self, scores: Any, normalized_scores: list[float]) -> Any:  # noqa: ARG002
        first, second = self._columns.found
        wanted = torch.tensor(normalized_scores, dtype=torch.float64)
        main = self.metadata.main_score
        self._model.question = StsPairs(first, second, wanted, main, self._model.own)
        return {main: 0.0}


class _Columns:
    """An encoder that remembers what it was asked for."""

    def __init__(self, model: Any) -> None:
        self.model, self.found = model, list[Tensor]()
        self.mteb_model_meta = model.mteb_model_meta
        self.similarity, self.similarity_pairwise = model.similarity, model.similarity_pairwise

    def encode(self, inputs: Any, **kwargs: Any) -> Any:
        rows = self.model.encode(inputs, **kwargs)
        self.found.append(_places(rows))
        return np.ones((len(rows), 1))  # whose distances are defined


class _RecordedClassification(AbsTaskClassification):
    """Records the examples that each experiment learns from, and those that it is asked."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._recorded(super()._evaluate_subset, model, *args, **kwargs)

    def _evaluate_subset_cross_validation(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._recorded(super()._evaluate_subset_cross_validation, model, *args, **kwargs)

    def _recorded(self, evaluate: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        self._found: list[tuple[Any, Any, Any, Any]] = []
        self._decoded: dict[int, tuple[Any, list[Any]]] = {}
        scores = evaluate(model, *args, **kwargs)
        labels = [label for one in self._found for label in (*one[1], *one[3])]
        check_classification_targets(np.asarray(labels))  # as scikit-learn's classifiers do
        known = {label: number for number, label in enumerate(sorted(set(labels)))}
        experiments = tuple(
            Experiment(_places(train), _codes(learnt, known), _places(test), _codes(asked, known))
            for train, learnt, test, asked in self._found
        )
        settings = self.evaluator_model.get_params()
        main = self.metadata.main_score
        model.question = Classifiers(
            experiments, settings["C"], settings["max_iter"], settings["tol"],
            None if main == "accuracy" else _Measure(self, list(known), main),
        )  # fmt: skip
        return scores

    def _run_experiment(
        self, train_split: Any, eval_split: Any, train_embeddings: Any, test_embeddings: Any, *_: Any, **__: Any
    ) -> Any:
        column = self.label_column_name
        if id(eval_split) not in self._decoded:  # kept with its labels, so that no other takes its place in memory
            self._decoded[id(eval_split)] = eval_split, list(eval_split[column][:])
        asked = self._decoded[id(eval_split)][1]
        self._found.append((train_embeddings, list(train_split[column][:]), test_embeddings, asked))
        return {self.metadata.main_score: 0.0}, []


@dataclass(frozen=True)
class _Measure:
    """A score of mteb's own of a test and its predictions, given as numbers of labels."""

    task: AbsTaskClassification
    labels: list[Any]
    name: str

    def __call__(self, wanted: Any, found: Any) -> float:
        labels = np.asarray(self.labels)
        scores: Mapping[str, Any] = self.task._calculate_scores(labels[wanted], labels[found])
        return float("nan") if scores[self.name] is None else float(scores[self.name])


class _RecordedClustering(AbsTaskClustering):
    """Records the draws that are clustered."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        def drawn(embeddings: Any, labels: Any, **how: Any) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
            model.question = _draws(embeddings, labels, **how)
            return {"v_measure": {"Level 0": [0.0]}, "ami": {"Level 0": [0.0]}}, {}

        evaluate = _with(AbsTaskClustering._evaluate_subset, _evaluate_clustering_bootstrapped=drawn)
        return evaluate(self, model, *args, **kwargs)


def _draws(embeddings: Any, labels: Any, **how: Any) -> Clusterings:
    """Return what mteb clusters, by its own drawing."""
    models: list[_KMeans] = []

    def k_means(**settings: Any) -> _KMeans:
        models.append(_KMeans(settings))
        return models[-1]

    def noted(truth: Any, _: Any) -> float:
        models[-1].labels.append(truth)
        return 0.0

    draw = _with(
        mteb_clustering._evaluate_clustering_bootstrapped,
        MiniBatchKMeans=k_means, v_measure_score=noted, adjusted_mutual_info_score=lambda *_: 0.0,
    )  # fmt: skip
    draw(embeddings, labels, **how)
    first = models[0].settings
    return Clusterings(tuple(map(_level, models)), first["batch_size"], first["random_state"])


@dataclass
class _KMeans:
    """Stands in for scikit-learn's, and notes what it is fitted to."""

    settings: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        wanted = {"init": "k-means++", "n_init": 1}
        if {"n_clusters", "batch_size", "random_state", *wanted} != set(self.settings) or any(
            self.settings[name] != value for name, value in wanted.items()
        ):
            raise NotImplementedError(f"mteb clusters in a way that is not known here: {self.settings}")

    def fit_predict(self, rows: Any) -> npt.NDArray[np.int64]:
        self.rows.append(rows)
        return np.zeros(len(rows), dtype=np.int64)


def _level(model: _KMeans) -> Draws:
    known = {label: number for number, label in enumerate(sorted(set(np.concatenate(model.labels).tolist())))}
    labels = torch.stack([_codes(one.tolist(), known) for one in model.labels])
    return Draws(torch.stack([_places(one) for one in model.rows]), labels, model.settings["n_clusters"])


class _Asked(Exception):  # noqa: N818  (it is no error)
    """Ends mteb's evaluation where it has asked everything."""


class _RecordedRetrieval(AbsTaskRetrieval):
    """Records queries, documents, and which are relevant."""

    def _evaluate_subset(self, model: Any, data_split: Any, **kwargs: Any) -> Any:
        search = _Search(model)
        with suppress(_Asked):
            super()._evaluate_subset(search, data_split, **kwargs)
        main = self.metadata.main_score
        model.question = make_ranking(
            search.queries, search.documents, data_split["relevant_docs"], top_ranked=search.top_ranked, score=main,
            depth=self._top_k, ignore_identical_ids=self.ignore_identical_ids, similarity=model.own,
        )  # fmt: skip
        return {main: 0.0}


class _Search(SearchEncoderWrapper):
    """Embeds queries and documents in mteb's order, and searches nothing."""

    queries: dict[str, int]
    documents: dict[str, int]
    top_ranked: Mapping[str, Sequence[str]] | None

    def search(
        self, queries: Any, *, encode_kwargs: Any, top_ranked: Any = None, num_proc: Any = None, **kwargs: Any
    ) -> Any:
        wanted = {name: kwargs[name] for name in ("task_metadata", "hf_split", "hf_subset")}

        def embedded(rows: Any, kind: PromptType) -> dict[str, int]:
            loader = create_dataloader(
                rows, task_metadata=wanted["task_metadata"], prompt_type=kind, num_proc=num_proc, **encode_kwargs
            )
            found = self.model.encode(loader, prompt_type=kind, **wanted, **encode_kwargs)
            return dict(zip(list(rows["id"]), np.asarray(found)[:, 0].tolist(), strict=True))

        corpus: Any = self.task_corpus
        self.queries, self.documents, self.top_ranked = embedded(queries, PromptType.query), {}, top_ranked
        size = len(corpus) if top_ranked is not None else self.corpus_chunk_size
        for start in range(0, len(corpus), max(size, 1)):
            part = corpus.select(range(start, min(start + size, len(corpus))))
            self.documents |= embedded(part, PromptType.document)
        raise _Asked


def _with(function: Any, **names: Any) -> Any:
    """Return a function of mteb's that finds other things under some names of its module, which is left as it is."""
    other = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    other.__kwdefaults__ = function.__kwdefaults__
    return other


_RECORDING: dict[type[AbsTask], type[AbsTask]] = {
    AbsTaskSTS: _RecordedSts,
    AbsTaskPairClassification: _RecordedPairs,
    AbsTaskClassification: _RecordedClassification,
    AbsTaskClustering: _RecordedClustering,
    AbsTaskRetrieval: _RecordedRetrieval,
}
"""What records each type of task."""
