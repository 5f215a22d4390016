"""What a local task is made of: columns in mteb's names, and a digest that is part of the task's name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

TaskType: TypeAlias = Literal[
    "Classification",
    "Clustering",
    "PairClassification",
    "Reranking",
    "STS",
    "Retrieval",
    "MultilabelClassification",
    "BitextMining",
    "Unlabeled",
]

TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The rows of a task, validated, with what its metadata says.

    Attributes:
        label: name without the digest.
        type: mteb's name of it, or ``"Unlabeled"``: texts that nothing can be scored on.
        splits: columns of ``test``, and of ``train`` for a classification, by mteb's names: ``text, label`` (lists of
            labels for several of them); ``sentences, labels``; ``sentence1, sentence2, labels``;
            ``query, positive, negative``; ``sentence1, sentence2, score``; ``sentence1, sentence2``; ``text``. A
            Retrieval has ``corpus`` (``id, title, text``), ``queries`` (``id, text``) and ``qrels``
            (``query-id, corpus-id, score``) in their place.
        description: what the rows are, for the metadata and for captions.
        origin: where the rows come from; the head of the dataset's revision.
        why: what it was taken for this type by.
        note: what was done to the rows that their owner should know.
        settings: of mteb's evaluation (``n_experiments``, ``samples_per_label`` …) that differ from its defaults.
    """

    label: str
    type: TaskType
    splits: Mapping[str, Mapping[str, Sequence[Any]]]
    description: str
    origin: str
    why: str = ""
    note: str = ""
    settings: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits that differ whenever a row or a setting does."""
        content = json.dumps([self.type, self.splits, dict(self.settings)], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()

    @property
    def name(self) -> str:
        """Name of the task: mteb's results are found by it alone, so that it must differ when the data do."""
        return f"{self.label}-{self.digest}"

    @property
    def revision(self) -> str:
        """Revision of the dataset: origin and digest."""
        return f"{self.origin},{self.digest}"


def task_label(name: str) -> str:
    """Return a task's name as figures show it: without the digest that a local task's name ends in.

    Example:
        >>> task_label("my_reviews-0a1b2c3d"), task_label("STS12")
        ('my_reviews', 'STS12')
    """
    return re.sub(r"-[0-9a-f]{8}$", "", name)
