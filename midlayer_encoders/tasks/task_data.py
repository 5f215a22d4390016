"""The rows of a local task under mteb's column names, and the digest in the task's name."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from midlayer_encoders._types import content_digest

TaskType: TypeAlias = Literal[
    "Classification", "Clustering", "PairClassification", "Reranking", "STS", "Retrieval", "Unlabeled"
]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """Validated rows of a task and its metadata.

    Attributes:
        label: name without the digest.
        type: mteb's name of the type, or ``"Unlabeled"`` for texts that cannot be scored.
        splits: columns of ``test``, and of ``train`` for a classification, by mteb's names: ``text, label``;
            ``sentences, labels``; ``sentence1, sentence2, labels``; ``query, positive, negative``;
            ``sentence1, sentence2, score``; ``text``. A Retrieval has ``corpus`` (``id, title, text``), ``queries``
            (``id, text``) and ``qrels`` (``query-id, corpus-id, score``) instead.
        description: description of the rows for the metadata and captions.
        origin: origin of the rows; the first part of the dataset's revision.
        note: changes to the rows that their owner should know about.
        settings: settings of mteb's evaluation (``n_experiments``, ``samples_per_label`` …) that differ from mteb's
            defaults.
    """

    type: TaskType
    splits: Mapping[str, Mapping[str, Sequence[Any]]]
    description: str = ""
    label: str = ""
    origin: str = "files"
    note: str = ""
    settings: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with every row and setting."""
        content = json.dumps([self.type, self.splits, dict(self.settings)], sort_keys=True)
        return content_digest(content, 4)

    @property
    def name(self) -> str:
        """Name of the task, which must change with the data because mteb finds results by name only."""
        return f"{self.label}-{self.digest}"

    @property
    def revision(self) -> str:
        """Revision of the dataset: origin and digest."""
        return f"{self.origin},{self.digest}"


def task_label(name: str) -> str:
    """Return a task's name without the digest at the end of a local task's name; a limit of its rows stays.

    Example:
        >>> task_label("my_reviews-0a1b2c3d"), task_label("my_reviews-0a1b2c3d[500]"), task_label("STS12")
        ('my_reviews', 'my_reviews[500]', 'STS12')
    """
    return re.sub(r"-[0-9a-f]{8}(?=$|\[\d+\]$)", "", name)


def whole_name(name: str) -> str:
    """Return a task's name without its limit.

    Example:
        >>> whole_name("Banking77Classification[500]"), whole_name("STS12")
        ('Banking77Classification', 'STS12')
    """
    return re.sub(r"\[\d+\]$", "", name)


def as_columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Return rows as named columns."""
    return {name: [row[number] for row in rows] for number, name in enumerate(names)}
