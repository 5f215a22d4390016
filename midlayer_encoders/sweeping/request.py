"""The arguments and settings of a sweep, validated once, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

from midlayer_encoders import validation
from midlayer_encoders._types import Layer, Precision, Progress
from midlayer_encoders.arguments import TokenBudget, check_budget, metric_names
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import check_output_folder
from midlayer_encoders.recipes import PLAIN, recipes_of
from midlayer_encoders.sweeping.compression import make_compressions
from midlayer_encoders.sweeping.store import StoreDtype
from midlayer_encoders.tasks.sources import Tasks, TaskSource, TextsSource, limited_sources, task_sources
from midlayer_encoders.tasks.tables import Columns

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

#: Score all layers of a task at once and confirm some with mteb, or score every layer with mteb.
Scoring: TypeAlias = Literal["together", "mteb"]


@dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """How a sweep scores, measures, stores and runs.

    Attributes:
        scoring: ``"together"`` scores all layers of a task at once, on the encoder's device, with the same results as
            mteb; mteb then confirms the best layer, the second best and the last, in rows of the kind ``"confirmed"``,
            and scores unusual tasks. ``"mteb"`` scores every layer with mteb.
        workers: processes that score layers with mteb; by default one per core.
        metric_texts: number of the tasks' texts to compute metrics on, chosen by their content.
        views: number of views per text for LiDAR.
        store_dtype: ``"float32"``, or ``"float16"`` to halve the space on disk (``--half`` on the command line).
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
    """

    scoring: Scoring = "together"
    workers: int | None = None
    metric_texts: int = 64
    views: int = 16
    store_dtype: StoreDtype = "float32"
    token_budget: TokenBudget = "auto"

    def __post_init__(self) -> None:
        validation.check_fields(
            self,
            scoring=lambda name, value: validation.check_choice(name, value, get_args(Scoring)),
            workers=lambda name, value: validation.check_count(name, value, "processes"),
            metric_texts=lambda name, value: validation.check_count(name, value, "texts"),
            views=validation.check_count,
            store_dtype=lambda name, value: validation.check_choice(name, value, get_args(StoreDtype)),
            token_budget=lambda _, value: check_budget(value),
        )


class SweepArguments:
    """The arguments of :func:`~midlayer_encoders.sweep` and their defaults, validated once, without torch.

    The tasks are read when :attr:`sources` is first used. Units of an executor carry the object as it is.
    """

    text_column: str | None = None
    label_column: str | None = None
    drop_empty: bool = False
    limit: int | None = None
    layers: Sequence[Layer] | str = "all"
    #: The recipes to sweep; ``None`` for a sweep that compares neither recipes nor compressions.
    recipes: Any = None
    dims: Sequence[int] = ()
    precisions: Sequence[Precision] = ()
    metrics: str | Sequence[str] = ()
    baselines: bool = True
    out: Path | None = None
    store: Path | str | None = None
    executor: Any = None
    progress: Progress | None = None
    settings: SweepSettings = SweepSettings()

    def __init__(self, model: str | LayerEncoder, tasks: Tasks = (), **arguments: Any) -> None:
        self.model, self.tasks = model, tasks
        for name in SweepArguments.__annotations__:
            setattr(self, name, arguments.pop(name, getattr(SweepArguments, name)))
        self.options: Mapping[str, Any] = arguments
        self.columns = Columns(self.text_column, self.label_column, self.drop_empty)
        self.compressions = make_compressions(self.dims, self.precisions)
        if self.recipes is not None or len(self.compressions) > 1:
            self.recipes = recipes_of("recipes", PLAIN if self.recipes is None else self.recipes)
        validation.check_flag("baselines", self.baselines)
        validation.check_path("out", self.out)
        if self.out is not None:
            self.out = Path(self.out)
            check_output_folder(self.out)
        validation.check_path("store", self.store)
        validation.check_progress(self.progress)
        self.center_texts: list[str] | None = None  # of the tasks, once they are read
        if self.has_metrics:
            metric_names(self.metrics)  # rejects an unknown name before a task runs
        else:
            counts = {name: getattr(self.settings, name) for name in ("metric_texts", "views")}
            validation.check_effect(SweepSettings, "without `metrics`", **counts)

    def change(self, **values: Any) -> Self:
        """Return a copy with other values of its attributes."""
        request = copy(self)
        vars(request).update(values)
        return request

    @cached_property
    def sources(self) -> list[TaskSource]:
        """The tasks; the folder of the results can be checked before they are read."""
        if isinstance(self.tasks, tuple) and not self.tasks:
            return []
        sources = limited_sources(task_sources(self.tasks, self.columns), self.limit)
        if all(isinstance(source, TextsSource) for source in sources):
            cure = "`select_layer` (midlayer select) chooses a layer or recipe without labels."
            if self.recipes is not None:
                raise OptionError(
                    "`recipes`, `dims` and `precisions` do not apply to texts without labels: a sweep compares them "
                    f"by their scores. {cure}"
                )
            if not self.has_metrics:
                raise OptionError(
                    "`metrics` must name at least one metric for texts without labels, which cannot be scored. " + cure
                )
        return sources

    @property
    def labeled(self) -> list[TaskSource]:
        """The tasks that can be scored."""
        return [source for source in self.sources if not isinstance(source, TextsSource)]

    @property
    def has_metrics(self) -> bool:
        """Whether metrics are requested."""
        return not (self.metrics is None or (isinstance(self.metrics, list | tuple) and not self.metrics))

    def folder(self, encoder: LayerEncoder) -> Path:
        """Return the folder of the results."""
        return self.out or Path("midlayer-results") / re.sub(r"[^\w.-]+", "_", encoder.name)
