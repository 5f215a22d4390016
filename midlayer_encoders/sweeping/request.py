"""The request of a sweep: its arguments and settings, validated once, without torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from midlayer_encoders import validation
from midlayer_encoders._types import Layer, Precision, Progress
from midlayer_encoders.arguments import TokenBudget, check_budget, metric_names
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import check_output_folder
from midlayer_encoders.recipes import PLAIN, Recipe, recipes_of
from midlayer_encoders.sweeping.compression import make_compressions
from midlayer_encoders.sweeping.store import StoreDtype
from midlayer_encoders.tasks.sources import Tasks, TaskSource, TextsSource, limited_sources, task_sources
from midlayer_encoders.tasks.tables import Columns

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

_Parameters = ParamSpec("_Parameters")
_Returned = TypeVar("_Returned")

#: Score all layers of a task at once and confirm some with mteb, or score every layer with mteb.
Scoring: TypeAlias = Literal["together", "mteb"]


@dataclass(kw_only=True)
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
        for name, unit in {"metric_texts": "texts", "views": ""}.items():
            setattr(self, name, validation.check_count(name, getattr(self, name), unit))
        if self.workers is not None:
            self.workers = validation.check_count("workers", self.workers, "processes")
        self.token_budget = check_budget(self.token_budget)
        validation.check_choice("store_dtype", self.store_dtype, ("float32", "float16"))
        validation.check_choice("scoring", self.scoring, get_args(Scoring))


class Sweep:
    """A request of a sweep: the arguments of :func:`~midlayer_encoders.sweep`, validated once, without torch.

    The tasks are read when :attr:`sources` is first used. Units of an executor carry the request as it is.
    """

    def __init__(
        self,
        model: str | LayerEncoder,
        tasks: Tasks = (),
        *,
        text_column: str | None = None,
        label_column: str | None = None,
        drop_empty: bool = False,
        limit: int | None = None,
        layers: Sequence[Layer] | str = "all",
        recipes: str | Recipe | Sequence[str | Recipe] | None = None,
        dims: Sequence[int] = (),
        precisions: Sequence[Precision] = (),
        metrics: str | Sequence[str] = (),
        baselines: bool = True,
        out: Path | str | None = None,
        store: Path | str | None = None,
        executor: Any = None,
        progress: Progress | None = None,
        settings: SweepSettings | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.options: Mapping[str, Any] = options
        self.tasks = tasks
        self.columns = Columns(text_column, label_column, drop_empty)
        self.limit = limit
        self.layers = layers
        self.compressions = make_compressions(dims, precisions)
        #: The recipes to sweep; ``None`` for a sweep that compares neither recipes nor compressions.
        self.recipes: Sequence[Recipe] | None = None
        if recipes is not None or len(self.compressions) > 1:
            self.recipes = recipes_of("recipes", PLAIN if recipes is None else recipes)
        self.metrics = metrics
        self.baselines = validation.check_flag("baselines", baselines)
        validation.check_path("out", out)
        self.out = None if out is None else Path(out)
        if self.out is not None:
            check_output_folder(self.out)
        validation.check_path("store", store)
        self.store = store
        self.executor = executor
        validation.check_progress(progress)
        self.progress = progress
        self.center_texts: list[str] | None = None  # of the tasks, once they are read
        self.settings = settings or SweepSettings()
        if self.has_metrics:
            metric_names(metrics)  # rejects an unknown name before a task runs
        else:
            counts = {name: getattr(self.settings, name) for name in ("metric_texts", "views")}
            validation.check_effect(SweepSettings, "without `metrics`", **counts)

    def change(self, **values: Any) -> Sweep:
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
        has_labels = not all(isinstance(source, TextsSource) for source in sources)
        if not has_labels and self.recipes is not None:
            raise OptionError(
                "`recipes`, `dims` and `precisions` do not apply to texts without labels: a sweep compares them "
                "by their scores. `select_layer` (midlayer select) chooses a recipe without labels."
            )
        if not has_labels and not self.has_metrics:
            raise OptionError(
                "`metrics` must name at least one metric for texts without labels, which cannot be scored. "
                "`select_layer` (midlayer select) chooses a layer without labels."
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


def takes_arguments_of(
    declaration: Callable[_Parameters, Any],
) -> Callable[[Callable[..., _Returned]], Callable[_Parameters, _Returned]]:
    """Give a function the arguments of another, for editors, type checkers and ``help``."""

    def declare(function: Callable[..., _Returned]) -> Callable[_Parameters, _Returned]:
        returned = inspect.signature(function).return_annotation
        declared = inspect.signature(declaration).replace(return_annotation=returned)
        function.__signature__ = declared  # type: ignore[attr-defined]
        return function

    return declare
