"""Access to private parts of mteb; each function explains why it needs them.

This module imports mteb, which takes seconds: import it inside functions. ``tests/tasks/test_mteb_internals.py`` fails
if a release of mteb changes one of these parts.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from mteb.abstasks import AbsTask, AbsTaskClassification
from mteb.get_tasks import TASK_LIST
from mteb.models.abs_encoder import AbsEncoder

if TYPE_CHECKING:
    from mteb.abstasks.classification import ClassificationMetrics
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType


def task_names() -> set[str]:
    """Return the name of every task of mteb, without making them all, as its public function would."""
    return {task.metadata.name for task in TASK_LIST}


def content_columns(task: AbsTask) -> set[str]:
    """Return the names of the columns that hold a task's inputs, which nothing public says."""
    return set(task._get_content_columns())


def prompt_name(prompts: dict[str, str], task: TaskMetadata, kind: PromptType | None) -> str | None:
    """Return which prompt mteb's own wrapper of a SentenceTransformer takes, without making one.

    Its method reads ``model_prompts`` and nothing else of itself.
    """
    return AbsEncoder.get_prompt_name(SimpleNamespace(model_prompts=prompts), task, kind)  # type: ignore[arg-type]


class ListedLabels(AbsTaskClassification):
    """A classification that decodes its labels in one go.

    mteb reads a lazy column of labels row by row, for every experiment and for each of its metrics: half of its time.
    Lists give the same draws and the same scores.
    """

    def _undersample_data(
        self, dataset: Any, experiment_num: int, idxs: list[int] | None = None
    ) -> tuple[Any, list[int], list[int]]:
        return super()._undersample_data(_Listed(dataset, self.label_column_name), experiment_num, idxs)

    def _calculate_scores(self, y_test: Any, y_pred: Any) -> ClassificationMetrics:
        return super()._calculate_scores(np.asarray(y_test[:]), y_pred)


class _Listed:
    """A dataset as far as the drawing of training rows asks for one, with its labels in a list."""

    def __init__(self, dataset: Any, column: str) -> None:
        self.dataset = dataset
        self.columns: dict[str, list[Any]] = {column: dataset[column][:]}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def select(self, indices: list[int]) -> Any:
        return self.dataset.select(indices)


def with_listed_labels(task: AbsTask) -> AbsTask:
    """Return a task of mteb's own that, if it is a classification, decodes its labels in one go; same scores.

    One that draws or scores in a way of its own (several labels a text, for instance) is left as it is.
    """
    drawn_as_usual = isinstance(task, AbsTaskClassification) and all(
        getattr(type(task), name) is getattr(AbsTaskClassification, name)
        for name in ("_undersample_data", "_calculate_scores")
    )
    if drawn_as_usual:  # which also says that it is not one of ours already
        task.__class__ = _listed(type(task))
    return task


@cache
def _listed(task_class: type[AbsTaskClassification]) -> type[AbsTaskClassification]:
    return type(task_class.__name__, (ListedLabels, task_class), {})
