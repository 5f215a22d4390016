"""The source of a task that is limited to a sample of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask


class _Source(Protocol):
    """The part of a task source that a sample needs."""

    @property
    def name(self) -> str:
        """Name of the task."""

    def make(self) -> AbsTask:
        """Return a new task."""


@dataclass(frozen=True)
class SampledSource:
    """A task that is limited to a sample of its rows.

    Attributes:
        source: source of the whole task.
        limit: rows of each split.
        rows: by split, the rows that mteb reads of the sample and of the whole task, and the texts of a row; filled
            when the data is loaded in this process.
    """

    source: _Source
    limit: int
    rows: dict[str, tuple[int, int, int]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the task with the limit, so that its results are never those of another sample."""
        return f"{self.source.name}[{self.limit}]"

    @property
    def hf_subsets(self) -> Any:
        """Subsets of an mteb task."""
        return getattr(self.source, "hf_subsets", None)

    @property
    def eval_splits(self) -> Any:
        """Splits of an mteb task."""
        return getattr(self.source, "eval_splits", None)

    def make(self) -> AbsTask:
        """Return a new task whose data is the sample."""
        from midlayer_encoders.tasks.sampled_tasks import sampled_task

        return sampled_task(self.source.make(), self.name, self.limit, self.rows)


def whole_source(source: Any) -> Any:
    """Return the source of the whole task."""
    return source.source if isinstance(source, SampledSource) else source
