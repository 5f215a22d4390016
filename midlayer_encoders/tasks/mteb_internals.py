"""Access to private parts of mteb; each function explains why it needs them.

This module imports mteb, which takes seconds: import it inside functions. ``tests/tasks/test_mteb_internals.py`` fails
if a release of mteb changes one of these parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from datasets import ClassLabel, Dataset, Value
from mteb.abstasks import AbsTask
from mteb.get_tasks import TASK_LIST
from mteb.models.abs_encoder import AbsEncoder

if TYPE_CHECKING:
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


_lazy_column = Dataset.__getitem__
_evaluations: set[object] = set()  # that are running, in all threads


@contextmanager
def listed_columns() -> Iterator[None]:
    """Make datasets decode a column of texts, labels or numbers at once inside a ``with`` block.

    mteb reads a lazy column row by row, for every experiment and every metric, which takes half of its time.
    """
    _evaluations.add(evaluation := object())
    Dataset.__getitem__ = _listed_column
    try:
        yield
    finally:
        _evaluations.remove(evaluation)
        if not _evaluations:
            Dataset.__getitem__ = _lazy_column


def _listed_column(dataset: Dataset, key: Any) -> Any:
    is_listed = isinstance(key, str) and isinstance(dataset.features.get(key), Value | ClassLabel)
    column = _lazy_column(dataset, key)
    return column[:] if is_listed else column
