"""Record mteb's evaluation of a task: it runs with row numbers in place of vectors.

So texts, prompts, splits, subsets, training examples and draws come from mteb's code. Importing mteb takes seconds:
import this module inside functions. ``tests/scoring/test_recording.py`` tests the private parts of mteb that are used.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from mteb import abstasks
from mteb._create_dataloaders import create_dataloader
from mteb._evaluators import SklearnEvaluator
from mteb.abstasks import AbsTask
from mteb.models.model_meta import ModelMeta
from mteb.models.search_wrappers import SearchEncoderWrapper
from mteb.types import PromptType
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from midlayer_encoders._isolation import with_globals
from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.scoring.all_layers import Scorer
from midlayer_encoders.sweeping.scoring.classification import ClassifierData, Classifiers
from midlayer_encoders.sweeping.scoring.clustering import Clusterings, Draws
from midlayer_encoders.sweeping.scoring.pairs import LabeledPairs, StsPairs
from midlayer_encoders.sweeping.scoring.retrieval import RANKING_SCORES, make_ranking
from midlayer_encoders.tasks.mteb_internals import listed_columns

#: Maps the inputs that mteb passes to an encoder, ``task_metadata`` and ``prompt_type`` to the key of each input.
Keys: TypeAlias = Callable[..., Sequence[str]]

#: Settings of the classifier that are supported, or have no effect.
_CLASSIFIER_SETTINGS = {"C", "max_iter", "tol", "random_state", "verbose", "n_jobs", "warm_start"}
_K_MEANS_SETTINGS = {"n_clusters", "batch_size", "random_state"}


def scores_together(task: AbsTask) -> str | None:
    """Return the reason why a task cannot be scored at all layers together, or ``None`` if it can.

    mteb scores tasks that change its evaluation.
    """
    if len(task.modalities) != 1:
        return f"its modalities are {', '.join(task.modalities)}"
    base = next((task_type for task_type in _TYPES if isinstance(task, task_type)), None)
    if base is None:
        return f"its type is {task.metadata.type}"
    _, scores, methods = _TYPES[base]
    main_score = str(task.metadata.main_score)
    if re.fullmatch(scores, main_score) is None:
        return f"its main score is {main_score}"
    for name in ("evaluate", "_evaluate_subset", "_add_main_score", *methods):
        module = getattr(type(task), name).__module__
        if module not in (base.__module__, AbsTask.__module__) and not module.startswith("midlayer_encoders.tasks."):
            return f"it overrides `{name}`"
    if isinstance(task, abstasks.AbsTaskClassification):
        return _unsupported_classifier(task)
    if isinstance(task, abstasks.AbsTaskRetrieval) and (task.skip_first_result or task._previous_results_model_meta):
        return "it ranks the results of another search"
    return None


def _unsupported_classifier(task: abstasks.AbsTaskClassification) -> str | None:
    """Return the reason why a task's classifier is not supported, or ``None`` if it is."""
    if task.evaluator is not SklearnEvaluator:
        return f"its evaluator is {task.evaluator.__name__}"
    model: Any = task.evaluator_model
    if type(model) is not LogisticRegression:
        return f"its classifier is {type(model).__name__}"
    defaults = LogisticRegression().get_params()
    settings = model.get_params()
    changed = {name: value for name, value in settings.items() if value != defaults[name]}
    changed = {name: value for name, value in changed.items() if name not in _CLASSIFIER_SETTINGS}
    return f"its classifier has other settings: {changed}" if changed else None


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
    mixin = next(mixin for base, (mixin, _, _) in _TYPES.items() if isinstance(task, base))
    task.__class__ = type(type(task).__name__, (mixin, type(task)), {})
    recorded: list[Recorded] = []
    for split in task.eval_splits:
        for subset in task.hf_subsets:
            rows = _RowEncoder(keys, similarity)
            # One task for all subsets because its random generator continues from subset to subset in mteb.
            with listed_columns():
                task.evaluate(rows, split, [subset], encode_kwargs={"batch_size": 32, "show_progress_bar": False})
            if rows.scorer is None:
                raise RuntimeError(f"mteb's evaluation of {task.metadata.name} ended without computing a score.")
            recorded.append(Recorded(split, subset, tuple(rows.places), rows.scorer))
    return recorded


@dataclass
class _RowEncoder:
    """An encoder for mteb whose vectors ``(N, 1)`` are row numbers from 1; equal inputs share a row."""

    keys: Keys
    similarity_name: str
    places: dict[str, int] = field(default_factory=dict)
    scorer: Scorer | None = None
    columns: list[Tensor] = field(default_factory=list)
    mteb_model_meta: ModelMeta = field(
        default_factory=lambda: ModelMeta.create_empty(overwrites={"name": "local/rows", "revision": "none"})
    )

    def encode(
        self, inputs: Any, *, task_metadata: Any, prompt_type: PromptType | None = None, **_: Any
    ) -> npt.NDArray[np.int64]:
        keys = self.keys(inputs, task_metadata=task_metadata, prompt_type=prompt_type)
        rows = np.array([[1 + self.places.setdefault(key, len(self.places))] for key in keys], dtype=np.int64)
        self.columns.append(_places(rows))
        return rows

    def similarity(self, first: Any, second: Any) -> npt.NDArray[np.float32]:
        return np.zeros((len(first), len(second)), dtype=np.float32)

    def similarity_pairwise(self, first: Any, _: Any) -> npt.NDArray[np.float32]:
        return np.zeros(len(first), dtype=np.float32)


def _places(rows: Any) -> Tensor:
    return torch.as_tensor(np.asarray(rows)[:, 0]) - 1


class _PairsRecorder(AbsTask):
    """Records both columns of pairs."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._rows = model
        return super()._evaluate_subset(model, *args, **kwargs)  # type: ignore[safe-super]

    def _record(self, scorer: type[StsPairs | LabeledPairs], targets: Tensor) -> dict[str, float]:
        score = self.metadata.main_score
        first, second = self._rows.columns
        self._rows.scorer = scorer(first, second, targets, score, self._rows.similarity_name)
        return {score: 0.0}


class _LabeledPairsRecorder(_PairsRecorder):
    """Records the labels of pairs."""

    def _compute_metrics(self, similarity_scores: Any, labels: Any) -> dict[str, float]:  # noqa: ARG002
        targets = torch.as_tensor(np.asarray(labels[:], dtype=np.int64))
        classes = torch.unique(targets).tolist()
        if len(classes) > 2 or (len(classes) == 2 and 1 not in classes):  # scikit-learn raises an error, too
            raise OptionError(f"Labels of pairs must be 1 for positive pairs, else 0, but are {classes[:9]}.")
        return self._record(LabeledPairs, targets)


class _StsRecorder(_PairsRecorder):
    """Records the gold similarities of pairs."""

    def _calculate_scores(self, scores: Any, normalized_scores: list[float]) -> Any:  # noqa: ARG002
        return self._record(StsPairs, torch.tensor(normalized_scores, dtype=torch.float64))


class _ClassificationRecorder(abstasks.AbsTaskClassification):
    """Records the training and test examples of each classifier."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._record(super()._evaluate_subset, model, *args, **kwargs)

    def _evaluate_subset_cross_validation(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self._record(super()._evaluate_subset_cross_validation, model, *args, **kwargs)

    def _record(self, evaluate: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        self._experiments: list[tuple[Any, Any, Any, Any]] = []
        scores = evaluate(model, *args, **kwargs)
        labels = [np.asarray(labels) for experiment in self._experiments for labels in experiment[1::2]]
        check_classification_targets(np.concatenate(labels))  # as scikit-learn's classifiers do
        names = np.unique(np.concatenate(labels))

        def codes(labels: Sequence[Any]) -> Tensor:
            return torch.from_numpy(np.searchsorted(names, labels))

        def measure(true: Any, predicted: Any) -> float:
            values: Mapping[str, Any] = self._calculate_scores(names[true], names[predicted])
            return float("nan") if values[score] is None else float(values[score])

        data = tuple(
            ClassifierData(_places(train), codes(train_labels), _places(test), codes(test_labels))
            for train, train_labels, test, test_labels in self._experiments
        )
        settings = self.evaluator_model.get_params()
        score = self.metadata.main_score
        options = (settings["C"], settings["max_iter"], settings["tol"])
        model.scorer = Classifiers(data, *options, None if score == "accuracy" else measure)
        return scores

    def _run_experiment(
        self, train_split: Any, eval_split: Any, train_embeddings: Any, test_embeddings: Any, *_: Any, **__: Any
    ) -> Any:
        column = self.label_column_name
        train_labels = list(train_split[column][:])
        self._experiments.append((train_embeddings, train_labels, test_embeddings, list(eval_split[column][:])))
        return {self.metadata.main_score: 0.0}, []


class _ClusteringRecorder(abstasks.AbsTaskClustering):
    """Records the draws that mteb's code clusters."""

    def _evaluate_subset(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        models: list[_KMeansRecorder] = []

        def k_means(**settings: Any) -> _KMeansRecorder:
            models.append(_KMeansRecorder(settings))
            return models[-1]

        def record_labels(truth: Any, _: Any) -> float:
            models[-1].labels.append(truth)
            return 0.0

        draw = with_globals(
            abstasks.clustering._evaluate_clustering_bootstrapped,
            MiniBatchKMeans=k_means,
            v_measure_score=record_labels,
            adjusted_mutual_info_score=lambda *_: 0.0,
        )
        evaluate = abstasks.AbsTaskClustering._evaluate_subset
        scores = with_globals(evaluate, _evaluate_clustering_bootstrapped=draw)(self, model, *args, **kwargs)
        settings = models[0].settings
        draws = tuple(level.draws() for level in models)
        model.scorer = Clusterings(draws, settings["batch_size"], settings["random_state"])
        return scores


@dataclass
class _KMeansRecorder:
    """A replacement of scikit-learn's k-means that records its inputs."""

    settings: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        others = {name: value for name, value in self.settings.items() if name not in _K_MEANS_SETTINGS}
        if others != {"init": "k-means++", "n_init": 1}:
            raise NotImplementedError(f"mteb clusters with settings that are not supported: {self.settings}")

    def fit_predict(self, rows: Any) -> npt.NDArray[np.int64]:
        self.rows.append(rows)
        return np.zeros(len(rows), dtype=np.int64)

    def draws(self) -> Draws:
        _, codes = np.unique(np.stack(self.labels), return_inverse=True)
        labels = torch.from_numpy(codes.reshape(len(self.labels), -1))
        return Draws(torch.stack([_places(draw) for draw in self.rows]), labels, self.settings["n_clusters"])


class _EverythingRecorded(Exception):  # noqa: N818  (not an error)
    """Ends mteb's evaluation."""


class _RetrievalRecorder(abstasks.AbsTaskRetrieval):
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
            task = {"task_metadata": context["task_metadata"], "prompt_type": prompt_type}
            loader = create_dataloader(rows, num_proc=num_proc, **task, **encode_kwargs)
            vectors = self.model.encode(loader, prompt_type=prompt_type, **context, **encode_kwargs)
            return dict(zip(list(rows["id"]), _places(vectors).tolist(), strict=True))

        corpus: Any = self.task_corpus
        self.queries = embed(queries, PromptType.query)
        self.documents = {}
        self.top_ranked = top_ranked
        size = len(corpus) if top_ranked is not None else self.corpus_chunk_size
        for start in range(0, len(corpus), max(size, 1)):
            part = corpus.select(range(start, min(start + size, len(corpus))))
            self.documents |= embed(part, PromptType.document)
        raise _EverythingRecorded


#: For each type of task the mixin that records it, the supported main scores, and methods it must not override.
_TYPES: dict[type[AbsTask], tuple[type, str, tuple[str, ...]]] = {
    abstasks.AbsTaskSTS: (_StsRecorder, r"((cosine|manhattan|euclidean)_)?(spearman|pearson)", ("_calculate_scores",)),
    abstasks.AbsTaskPairClassification: (
        _LabeledPairsRecorder, r"(max|similarity|dot|cosine|manhattan|euclidean)_ap", ("_compute_metrics",),
    ),
    abstasks.AbsTaskClassification: (
        _ClassificationRecorder, r"accuracy|(f1|precision|recall|ap)(_weighted)?",
        ("_evaluate_subset_cross_validation", "_run_experiment", "_calculate_avg_scores", "_calculate_scores"),
    ),
    abstasks.AbsTaskClustering: (_ClusteringRecorder, r"v_measure", ()),
    abstasks.AbsTaskRetrieval: (
        _RetrievalRecorder, rf"accuracy|({'|'.join(RANKING_SCORES)})_at_\d+", ("task_specific_scores",),
    ),
}  # fmt: skip
