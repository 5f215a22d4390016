"""Tasks that are left to mteb, and the private parts of mteb that the recording relies on."""

import inspect
from typing import Any

import mteb
import pytest
from mteb.abstasks import AbsTaskClassification, AbsTaskClustering, AbsTaskRetrieval
from mteb.abstasks.clustering import _evaluate_clustering_bootstrapped
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from midlayer_encoders._isolation import with_globals
from midlayer_encoders.sweeping.scoring.recording import _KMeansRecorder, scores_together
from midlayer_encoders.tasks import resolve_tasks
from tests.scoring.made import classification, pairs, retrieval, sts
from tests.support.others_warnings import MTEB

pytestmark = MTEB


@pytest.mark.slow
def test_built_in_and_plain_mteb_tasks_are_scored_together() -> None:
    assert [scores_together(task) for task in resolve_tasks("builtin")] == [None] * 5
    for name in ("STSBenchmark", "Banking77Classification", "TwitterURLCorpus", "AskUbuntuDupQuestions", "SciFact",
                 "ArXivHierarchicalClusteringS2S", "CIFAR10", "SpeechCommands"):  # fmt: skip
        assert scores_together(mteb.get_task(name)) is None, name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MindSmallReranking", "its main score is max_over_subqueries_map_at_1000"),
        ("ArxivClusteringS2S", "its type is Clustering"),
        ("SummEval", "its type is Summarization"),
        ("BUCC", "its type is BitextMining"),
        ("CIFAR10ZeroShot", "its modalities are text, image"),
        ("MultiEURLEXMultilabelClassification", "it overrides `_evaluate_subset`"),
    ],
)
def test_unusual_tasks_are_left_to_mteb(name: str, reason: str) -> None:
    actual = scores_together(mteb.get_task(name))
    assert actual is not None
    assert reason in actual


def test_task_with_custom_evaluation_is_left_to_mteb() -> None:
    def own(self: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError

    for make, method in (
        (sts, "_calculate_scores"), (pairs, "_compute_metrics"), (classification, "_run_experiment"),
        (classification, "_calculate_scores"),
        (retrieval, "task_specific_scores"), (sts, "evaluate"), (retrieval, "_evaluate_subset"),
    ):  # fmt: skip
        task = make()
        task.__class__ = type("Own", (type(task),), {method: own})
        assert scores_together(task) == f"it overrides `{method}`"
    task = retrieval()
    task.skip_first_result = True
    assert scores_together(task) == "it ranks the results of another search"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (KNeighborsClassifier(), "its classifier is KNeighborsClassifier"),
        (LogisticRegression(class_weight="balanced"), "other settings: {'class_weight': 'balanced'}"),
        (LogisticRegression(fit_intercept=False), "other settings: {'fit_intercept': False}"),
        (LogisticRegression(solver="newton-cg"), "other settings: {'solver': 'newton-cg'}"),
        (LogisticRegression(C=0.5, max_iter=7, tol=0.1, random_state=3), None),
    ],
)
def test_classifier_is_supported_or_named(model: Any, reason: str | None) -> None:
    actual = scores_together(classification(evaluator_model=model))
    assert actual == reason or (reason is not None and actual is not None and reason in actual)


def test_replaced_private_functions_of_mteb_still_exist() -> None:
    for name in ("MiniBatchKMeans", "v_measure_score", "adjusted_mutual_info_score"):
        assert name in _evaluate_clustering_bootstrapped.__globals__
        assert name in inspect.getsource(_evaluate_clustering_bootstrapped)
    assert "_evaluate_clustering_bootstrapped(" in inspect.getsource(AbsTaskClustering._evaluate_subset)
    for base, method in (
        (AbsTaskClassification, "_run_experiment"), (AbsTaskClassification, "_evaluate_subset_cross_validation"),
        (AbsTaskRetrieval, "_evaluate_subset"),
    ):  # fmt: skip
        assert callable(getattr(base, method))
    with pytest.raises(NotImplementedError, match="mteb clusters with settings that are not supported"):
        _KMeansRecorder({"n_clusters": 3, "batch_size": 8, "random_state": 0, "init": "random", "n_init": 1})


def test_function_with_other_names_leaves_its_module_unchanged() -> None:
    other_item = with_globals(_evaluate_clustering_bootstrapped, MiniBatchKMeans=None)
    assert other_item.__globals__["MiniBatchKMeans"] is None
    assert _evaluate_clustering_bootstrapped.__globals__["MiniBatchKMeans"] is not None
