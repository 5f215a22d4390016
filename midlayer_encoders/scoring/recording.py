"""Record mteb's evaluation of a task: it runs with row numbers in place of vectors.

So texts, prompts, splits, subsets, training examples and draws come from mteb's code. Importing mteb takes seconds:
import this module inside functions. ``tests/scoring/test_recording.py`` tests the private parts of mteb that are used.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from mteb._create_dataloaders import create_dataloader
from mteb._evaluators import SklearnEvaluator
from mteb.abstasks import (
    AbsTask,
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
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.scoring.classification import ClassifierData, Classifiers
from midlayer_encoders.scoring.clustering import Clusterings, Draws
from midlayer_encoders.scoring.pairs import LabeledPairs, StsPairs
from midlayer_encoders.scoring.retrieval import RANKING_SCORES, make_ranking

if TYPE_CHECKING:
    from mteb.abstasks.task_metadata import TaskMetadata
    from torch.utils.data import DataLoader

    from midlayer_encoders.scoring.all_layers import Scorer

_PAIR_MEASURES = "cosine|manhattan|euclidean"
# Supported main scores of each task type, and the methods that a task must not override.
_TYPES: dict[type[AbsTask], tuple[str, tuple[str, ...]]] = {
    AbsTaskSTS: (rf"(({_PAIR_MEASURES})_)?(spearman|pearson)", ("_calculate_scores",)),
    AbsTaskPairClassification: (rf"(max|similarity|dot|{_PAIR_MEASURES})_ap", ("_compute_metrics",)),
    AbsTaskClassification: (
        r"accuracy|f1|f1_weighted|precision|precision_weighted|recall|recall_weighted|ap|ap_weighted",
        ("_evaluate_subset_cross_validation", "_run_experiment", "_calculate_avg_scores", "_calculate_scores"),
    ),
    AbsTaskClustering: (r"v_measure", ()),
    AbsTaskRetrieval: (rf"accuracy|({'|'.join(RANKING_SCORES)})_at_\d+", ("task_specific_scores",)),
}
_SETTINGS = {"l1_ratio", "C", "max_iter", "tol", "random_state", "verbose", "n_jobs", "penalty", "warm_start"}


def scores_together(task: AbsTask) -> str | None:
    """Return the reason why a task cannot be scored at all layers together, or ``None`` if it can.

    mteb scores tasks that change its evaluation.
    """
    if list(task.modalities) != ["text"]:
        return f"its modalities are {', '.join(task.modalities)}"
    base = next((task_type for task_type in _TYPES if isinstance(task, task_type)), None)
    if base is None:
        return f"its type is {task.metadata.type}"
    scores, methods = _TYPES[base]
    main_score = str(task.metadata.main_score)
    if re.fullmatch(scores, main_score) is None:
        return f"its main score is {main_score}"
    for name in ("evaluate", "_evaluate_subset", "_add_main_score", *methods):
        module = getattr(type(task), name).__module__
        if module not in (base.__module__, AbsTask.__module__) and not module.startswith("midlayer_encoders.tasks."):
            return f"it overrides `{name}`"
    if isinstance(task, AbsTaskClassification):
        return _unsupported_classifier(task)
    if isinstance(task, AbsTaskRetrieval) and (task.skip_first_result or task._previous_results_model_meta):
        return "it ranks the results of another search"
    return None


def _unsupported_classifier(task: AbsTaskClassification) -> str | None:
    """Return the reason why a task's classifier is not supported, or ``None`` if it is."""
    if task.evaluator is not SklearnEvaluator:
        return f"its evaluator is {task.evaluator.__name__}"
    model: Any = task.evaluator_model
    if type(model) is not LogisticRegression:
        return f"its classifier is {type(model).__name__}"
    defaults = LogisticRegression().get_params()
    settings = model.get_params()
    changed = {name: value for name, value in settings.items() if name not in _SETTINGS and value != defaults[name]}
    changed |= {name: settings[name] for name in ("l1_ratio", "penalty") if settings.get(name) != defaults.get(name)}
    return f"its classifier has other settings: {changed}" if changed else None


class Keys(Protocol):
    """Returns the key of each input that mteb passes to an encoder; it may embed the inputs, too."""

    def __call__(
        self, inputs: DataLoader[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None
    ) -> Sequence[str]:
        """Return a key for each input."""


@dataclass(frozen=True)
class Recorded:
    """The scorer of one subset of one split of a task, and the keys of its N rows."""

    split: str
    subset: str
    keys: tuple[str, ...]
    scorer: Scorer


def record(task: AbsTask, keys: Keys, *, similarity: str = "cosine") -> list[Recorded]:
    """Return the scorer of each subset of each split of a task that :func:`scores_together` accepts.

    Args:
        task: a new task; it cannot be used again.
        keys: returns the keys of inputs.
        similarity: the encoder's similarity, as in sentence-transformers' ``similarity_fn_name``.
    """
    mixin = next(mixin for base, mixin in _RECORDERS.items() if isinstance(task, base))
    task.__class__ = type(type(task).__name__, (mixin, type(task)), {})
    recorded: list[Recorded] = []
    for split in task.eval_splits:
        for subset in task.hf_subsets:
            rows = _RowEncoder(keys, similarity)
            # One task for all subsets because its random generator continues from subset to subset in mteb.
            task.evaluate(rows, split, [subset], encode_kwargs={"batch_size": 32, "show_progress_bar": False})
            if rows.scorer is None:
                raise RuntimeError(f"mteb's evaluation of {task.metadata.name} ended without computing a score.")
            recorded.append(Recorded(split, subset, tuple(rows.places), rows.scorer))
    return recorded


@dataclass
class _RowEncoder:
    """An encoder for mteb whose vectors are row numbers, ``(N, 1)``; equal inputs share a row."""

    keys: Keys
    similarity_name: str
    places: dict[str, int] = field(default_factory=dict)
    scorer: Scorer | None = None
    mteb_model_meta: ModelMeta = field(
        default_factory=lambda: ModelMeta.create_empty(overwrites={"name": "local/rows", "revision": "none"})
    )

    def encode(
        self,
        inputs: DataLoader[Any],
        *,
        task_metadata: TaskMetadata,
        hf_split: str,  # noqa: ARG002  (mteb's names)
        hf_subset: str,  # noqa: ARG002
        prompt_type: PromptType | None = None,
        **_: Any,
    ) -> npt.NDArray[np.int64]:
        keys = self.keys(inputs, task_metadata=task_metadata, prompt_type=prompt_type)
        return np.array([[self.places.setdefault(key, len(self.places))] for key in keys], dtype=np.int64)

    def similarity(self, first: Any, second: Any) -> npt.NDArray[np.float32]:
        return np.zeros((len(first), len(second)), dtype=np.float32)

    def similarity_pairwise(self, first: Any, _: Any) -> npt.NDArray[np.float32]:
        return np.zeros(len(first), dtype=np.float32)


def _places(rows: Any) -> Tensor:
    return torch.as_tensor(np.asarray(rows)[:, 0])


def _codes(labels: Sequence[Any], numbers: Mapping[Any, int]) -> Tensor:
    return torch.tensor([numbers[label] for label in labels])


class _PairColumns:
    """An encoder that remembers the rows of each column of pairs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.columns: list[Tensor] = []
        self.mteb_model_meta = model.mteb_model_meta
        self.similarity = model.similarity
        self.similarity_pairwise = model.similarity_pairwise

    def encode(self, inputs: Any, **kwargs: Any) -> Any:
        rows = self.model.encode(inputs, **kwargs)
        self.columns.append(_places(rows))
        return np.ones((len(rows), 1))  # vectors with defined distances

    def record(self, scorer: type[StsPairs | LabeledPairs], targets: Tensor, score: str) -> dict[str, float]:
        first, second = self.columns
        self.model.scorer = scorer(first, second, targets, score, self.model.similarity_name)
        return {score: 0.0}


class _LabeledPairsRecorder(AbsTaskPairClassification):
    """Records both columns of pairs and the labels."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._pairs = _PairColumns(model)
        return super()._evaluate_subset(self._pairs, *args, **kwargs)

    def _compute_metrics(self, similarity_scores: Any, labels: Any) -> dict[str, float]:  # noqa: ARG002
        targets = torch.as_tensor(np.asarray(labels[:], dtype=np.int64))
        classes = torch.unique(targets).tolist()
        if len(classes) > 2 or (len(classes) == 2 and 1 not in classes):  # scikit-learn raises an error, too
            raise OptionError(f"Labels of pairs must be 1 for positive pairs, else 0, but are {classes[:9]}.")
        return self._pairs.record(LabeledPairs, targets, self.metadata.main_score)


class _StsRecorder(AbsTaskSTS):
    """Records both columns of pairs and the gold similarities."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._pairs = _PairColumns(model)
        return super()._evaluate_subset(self._pairs, *args, **kwargs)

    def _calculate_scores(self, scores: Any, normalized_scores: list[float]) -> Any:  # noqa: ARG002
        targets = torch.tensor(normalized_scores, dtype=torch.float64)
        return self._pairs.record(StsPairs, targets, self.metadata.main_score)


class _ClassificationRecorder(AbsTaskClassification):
    """Records the training and test examples of each classifier."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._recorded(super()._evaluate_subset, model, *args, **kwargs)

    def _evaluate_subset_cross_validation(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._recorded(super()._evaluate_subset_cross_validation, model, *args, **kwargs)

    def _recorded(self, evaluate: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        self._experiments: list[tuple[Any, Any, Any, Any]] = []
        self._test_labels: dict[int, tuple[Any, list[Any]]] = {}
        scores = evaluate(model, *args, **kwargs)
        labels = [label for experiment in self._experiments for label in (*experiment[1], *experiment[3])]
        check_classification_targets(np.asarray(labels))  # as scikit-learn's classifiers do
        numbers = {label: number for number, label in enumerate(sorted(set(labels)))}
        data = tuple(
            ClassifierData(_places(train), _codes(train_labels, numbers), _places(test), _codes(test_labels, numbers))
            for train, train_labels, test, test_labels in self._experiments
        )
        settings = self.evaluator_model.get_params()
        score = self.metadata.main_score
        measure = None if score == "accuracy" else _Measure(self, list(numbers), score)
        model.scorer = Classifiers(data, settings["C"], settings["max_iter"], settings["tol"], measure)
        return scores

    def _run_experiment(
        self, train_split: Any, eval_split: Any, train_embeddings: Any, test_embeddings: Any, *_: Any, **__: Any
    ) -> Any:
        column = self.label_column_name
        if id(eval_split) not in self._test_labels:  # stored with the split, so that the id stays unique
            self._test_labels[id(eval_split)] = eval_split, list(eval_split[column][:])
        test_labels = self._test_labels[id(eval_split)][1]
        self._experiments.append((train_embeddings, list(train_split[column][:]), test_embeddings, test_labels))
        return {self.metadata.main_score: 0.0}, []


@dataclass(frozen=True)
class _Measure:
    """A score that mteb computes from test labels and predictions, here given as numbers of labels."""

    task: AbsTaskClassification
    labels: list[Any]
    name: str

    def __call__(self, labels: Any, predicted: Any) -> float:
        names = np.asarray(self.labels)
        scores: Mapping[str, Any] = self.task._calculate_scores(names[labels], names[predicted])
        return float("nan") if scores[self.name] is None else float(scores[self.name])


class _ClusteringRecorder(AbsTaskClustering):
    """Records the draws that are clustered."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        def record_draws(
            embeddings: Any, labels: Any, **settings: Any
        ) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
            model.scorer = _clusterings(embeddings, labels, **settings)
            return {"v_measure": {"Level 0": [0.0]}, "ami": {"Level 0": [0.0]}}, {}

        evaluate = _with_globals(AbsTaskClustering._evaluate_subset, _evaluate_clustering_bootstrapped=record_draws)
        return evaluate(self, model, *args, **kwargs)


def _clusterings(embeddings: Any, labels: Any, **settings: Any) -> Clusterings:
    """Return the draws that mteb's code clusters."""
    models: list[_KMeansRecorder] = []

    def k_means(**model_settings: Any) -> _KMeansRecorder:
        models.append(_KMeansRecorder(model_settings))
        return models[-1]

    def record_labels(truth: Any, _: Any) -> float:
        models[-1].labels.append(truth)
        return 0.0

    draw = _with_globals(
        mteb_clustering._evaluate_clustering_bootstrapped,
        MiniBatchKMeans=k_means,
        v_measure_score=record_labels,
        adjusted_mutual_info_score=lambda *_: 0.0,
    )
    draw(embeddings, labels, **settings)
    first = models[0].settings
    return Clusterings(tuple(model.draws() for model in models), first["batch_size"], first["random_state"])


@dataclass
class _KMeansRecorder:
    """A replacement of scikit-learn's k-means that records its inputs."""

    settings: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        expected = {"init": "k-means++", "n_init": 1}
        if {"n_clusters", "batch_size", "random_state", *expected} != set(self.settings) or any(
            self.settings[name] != value for name, value in expected.items()
        ):
            raise NotImplementedError(f"mteb clusters with settings that are not supported: {self.settings}")

    def fit_predict(self, rows: Any) -> npt.NDArray[np.int64]:
        self.rows.append(rows)
        return np.zeros(len(rows), dtype=np.int64)

    def draws(self) -> Draws:
        names = sorted(set(np.concatenate(self.labels).tolist()))
        numbers = {label: number for number, label in enumerate(names)}
        labels = torch.stack([_codes(draw.tolist(), numbers) for draw in self.labels])
        return Draws(torch.stack([_places(draw) for draw in self.rows]), labels, self.settings["n_clusters"])


class _EverythingRecorded(Exception):  # noqa: N818  (not an error)
    """Ends mteb's evaluation."""


class _RetrievalRecorder(AbsTaskRetrieval):
    """Records queries, documents and relevance."""

    def _evaluate_subset(self, model: Any, data_split: Any, **kwargs: Any) -> Any:
        search = _SearchRecorder(model)
        with suppress(_EverythingRecorded):
            super()._evaluate_subset(search, data_split, **kwargs)
        score = self.metadata.main_score
        model.scorer = make_ranking(
            search.queries,
            search.documents,
            data_split["relevant_docs"],
            top_ranked=search.top_ranked,
            score=score,
            depth=self._top_k,
            ignore_identical_ids=self.ignore_identical_ids,
            similarity=model.similarity_name,
        )
        return {score: 0.0}


class _SearchRecorder(SearchEncoderWrapper):
    """Embeds queries and documents in mteb's order, without searching."""

    queries: dict[str, int]
    documents: dict[str, int]
    top_ranked: Mapping[str, Sequence[str]] | None

    def search(
        self, queries: Any, *, encode_kwargs: Any, top_ranked: Any = None, num_proc: Any = None, **kwargs: Any
    ) -> Any:
        context = {name: kwargs[name] for name in ("task_metadata", "hf_split", "hf_subset")}

        def embed(rows: Any, prompt_type: PromptType) -> dict[str, int]:
            loader = create_dataloader(
                rows,
                task_metadata=context["task_metadata"],
                prompt_type=prompt_type,
                num_proc=num_proc,
                **encode_kwargs,
            )
            vectors = self.model.encode(loader, prompt_type=prompt_type, **context, **encode_kwargs)
            return dict(zip(list(rows["id"]), np.asarray(vectors)[:, 0].tolist(), strict=True))

        corpus: Any = self.task_corpus
        self.queries = embed(queries, PromptType.query)
        self.documents = {}
        self.top_ranked = top_ranked
        size = len(corpus) if top_ranked is not None else self.corpus_chunk_size
        for start in range(0, len(corpus), max(size, 1)):
            part = corpus.select(range(start, min(start + size, len(corpus))))
            self.documents |= embed(part, PromptType.document)
        raise _EverythingRecorded


def _with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of a function with other values of some globals; its module stays unchanged."""
    namespace = {**function.__globals__, **names}
    other = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    return other


_RECORDERS: dict[type[AbsTask], type[AbsTask]] = {
    AbsTaskSTS: _StsRecorder,
    AbsTaskPairClassification: _LabeledPairsRecorder,
    AbsTaskClassification: _ClassificationRecorder,
    AbsTaskClustering: _ClusteringRecorder,
    AbsTaskRetrieval: _RetrievalRecorder,
}
"""Mixins that record each type of task."""
