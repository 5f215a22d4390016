"""A task whose classifier is not the supported one is left to mteb, with the reason."""

from pathlib import Path
from typing import Any

import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from midlayer_encoders.sweeping.scoring.recording import scores_together
from midlayer_encoders.tasks import resolve_tasks
from tests.support.others_warnings import MTEB
from tests.tasks.rows import ROWS, write

pytestmark = MTEB


@pytest.mark.parametrize(
    ("classifier", "reason"),
    [
        (LogisticRegression(l1_ratio=1.0, solver="saga"), "'l1_ratio': 1.0"),
        (LogisticRegression(solver="liblinear"), "'solver': 'liblinear'"),
        (LogisticRegression(class_weight="balanced"), "'class_weight': 'balanced'"),
        (LogisticRegression(fit_intercept=False), "'fit_intercept': False"),
        (KNeighborsClassifier(), "its classifier is KNeighborsClassifier"),
        (LogisticRegression(C=2.0, max_iter=7), None),
    ],
)
def test_other_classifiers_are_left_to_mteb(classifier: Any, reason: str | None, tmp_path: Path) -> None:
    (task,) = resolve_tasks(write(tmp_path / "kinds.jsonl", ROWS["Classification"]))
    task.evaluator_model = classifier  # type: ignore[attr-defined]
    actual = scores_together(task)
    assert actual is None if reason is None else reason in str(actual)
