"""Access to private parts of mteb; each function explains why it needs them.

This module imports mteb, which takes seconds: import it inside functions. ``tests/tasks/test_mteb_internals.py`` fails
if a release of mteb changes one of these parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from mteb import _create_dataloaders
from mteb.abstasks import AbsTask, AbsTaskClassification
from mteb.get_tasks import TASK_LIST
from mteb.models.abs_encoder import AbsEncoder

if TYPE_CHECKING:
    from mteb.abstasks.classification import ClassificationMetrics
    from mteb.abstasks.task_metadata import TaskMetadata
    from mteb.types import PromptType


def task_names() -> set[str]:
    """Return the names of all mteb tasks; mteb's public function would instantiate every task."""
    return {task.metadata.name for task in TASK_LIST}


def content_columns(task: AbsTask) -> set[str]:
    """Return the names of the columns that hold a task's inputs; mteb has no public function for this."""
    return set(task._get_content_columns())


def prompt_name(prompts: dict[str, str], task: TaskMetadata, kind: PromptType | None) -> str | None:
    """Return the prompt name that mteb's SentenceTransformer wrapper selects, without creating a wrapper.

    The wrapper's method reads only its attribute ``model_prompts``.
    """
    return AbsEncoder.get_prompt_name(SimpleNamespace(model_prompts=prompts), task, kind)  # type: ignore[arg-type]


class ListedLabels(AbsTaskClassification):
    """A classification task that decodes all labels at once.

    mteb reads a lazy column of labels row by row for every experiment and every metric, which takes half of its time.
    Lists give the same samples and scores.
    """

    def _undersample_data(
        self, dataset: Any, experiment_num: int, idxs: list[int] | None = None
    ) -> tuple[Any, list[int], list[int]]:
        return super()._undersample_data(_Listed(dataset, self.label_column_name), experiment_num, idxs)

    def _calculate_scores(self, y_test: Any, y_pred: Any) -> ClassificationMetrics:
        return super()._calculate_scores(np.asarray(y_test[:]), y_pred)


class _Listed:
    """The part of a dataset that mteb needs to sample training rows, with the labels in a list."""

    def __init__(self, dataset: Any, column: str) -> None:
        self.dataset = dataset
        self.columns: dict[str, list[Any]] = {column: dataset[column][:]}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def select(self, indices: list[int]) -> Any:
        return self.dataset.select(indices)


def with_lists(task: AbsTask) -> AbsTask:
    """Make mteb decode the labels of a classification at once, and return the task.

    The scores are the same. Tasks that override the sampling or the scoring, such as multilabel classification, keep
    their way to read labels.
    """
    is_standard = isinstance(task, AbsTaskClassification) and all(
        getattr(type(task), name) is getattr(AbsTaskClassification, name)
        for name in ("_undersample_data", "_calculate_scores")
    )
    if is_standard:  # False if the class already is a `ListedLabels`
        task.__class__ = _with_listed_labels(type(task))
    return task


_lazy_dataloader = _create_dataloaders._create_dataloader_from_texts
_evaluations: set[object] = set()  # that are running, in all threads


@contextmanager
def listed_texts() -> Iterator[None]:
    """Make mteb decode the texts of a task at once inside a ``with`` block."""
    _evaluations.add(evaluation := object())
    _create_dataloaders._create_dataloader_from_texts = _dataloader_of_texts
    try:
        yield
    finally:
        _evaluations.remove(evaluation)
        if not _evaluations:
            _create_dataloaders._create_dataloader_from_texts = _lazy_dataloader


def _dataloader_of_texts(text: Sequence[str], *args: Any, **options: Any) -> Any:
    """Return mteb's dataloader of a list: it decodes a lazy column row by row, 200 times as slowly."""
    return _lazy_dataloader(list(text[:]), *args, **options)


@cache
def _with_listed_labels(task_class: type[AbsTaskClassification]) -> type[AbsTaskClassification]:
    return type(task_class.__name__, (ListedLabels, task_class), {})
