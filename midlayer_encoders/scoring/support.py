"""Which tasks can be scored together. Imports mteb, which takes seconds: import this module inside functions."""

from __future__ import annotations

import re
from typing import Any

from mteb._evaluators import SklearnEvaluator
from mteb.abstasks import (
    AbsTask,
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
)
from sklearn.linear_model import LogisticRegression

from midlayer_encoders.scoring.retrieval import RANKING_SCORES

_PAIR_MEASURES = "cosine|manhattan|euclidean"
# What each type is asked by: the main scores that are known here, and the methods that must be mteb's own.
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
    """Return why a task cannot be scored at all layers together, or ``None`` where it can.

    What mteb does in an unusual way on a task is left to mteb.
    """
    if list(task.modalities) != ["text"]:
        return f"it is of {', '.join(task.modalities)}"
    base = next((one for one in _TYPES if isinstance(task, one)), None)
    if base is None:
        return f"it is of the type {task.metadata.type}"
    scores, methods = _TYPES[base]
    main = str(task.metadata.main_score)
    if re.fullmatch(scores, main) is None:
        return f"its main score is {main}"
    for name in ("evaluate", "_evaluate_subset", "_add_main_score", *methods):
        where = getattr(type(task), name).__module__
        if where not in (base.__module__, AbsTask.__module__) and not where.startswith("midlayer_encoders.tasks."):
            return f"it has a way of its own to evaluate (`{name}`)"
    if isinstance(task, AbsTaskClassification):
        return _classifier(task)
    if isinstance(task, AbsTaskRetrieval) and (task.skip_first_result or task._previous_results_model_meta):
        return "it ranks the results of another search"
    return None


def _classifier(task: AbsTaskClassification) -> str | None:
    """Return why a task's classifier is not the one that is known here."""
    if task.evaluator is not SklearnEvaluator:
        return f"it is evaluated by {task.evaluator.__name__}"
    model: Any = task.evaluator_model
    if type(model) is not LogisticRegression:
        return f"its classifier is {type(model).__name__}"
    plain, given = LogisticRegression().get_params(), model.get_params()
    other = {name: value for name, value in given.items() if name not in _SETTINGS and value != plain[name]}
    other |= {name: given[name] for name in ("l1_ratio", "penalty") if given.get(name) != plain.get(name)}
    return f"its classifier has other settings: {other}" if other else None
