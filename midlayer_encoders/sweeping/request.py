"""The request of a sweep: its settings and arguments, checked without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from midlayer_encoders import validation
from midlayer_encoders._types import Layer, Precision, Progress
from midlayer_encoders.arguments import TokenBudget, check_budget, metric_names
from midlayer_encoders.files import check_output_folder
from midlayer_encoders.recipes import PLAIN, Recipe, recipes_of
from midlayer_encoders.sweeping.compression import make_compressions
from midlayer_encoders.sweeping.store import StoreDtype

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

#: Score all layers of a task at once and confirm some with mteb, or score every layer with mteb.
Scoring: TypeAlias = Literal["together", "mteb"]


@dataclass(kw_only=True)
class SweepSettings:
    """How a sweep scores, measures, stores and runs.

    Attributes:
        scoring: ``"together"`` scores all layers of a task at once, on the encoder's device, with the same results as
            mteb; mteb then confirms the best layer, the second best and the last, in rows of the kind ``"confirmed"``,
            and scores unusual tasks. ``"mteb"`` scores every layer with mteb.
        workers: processes that score layers with mteb; by default one per core, shared by ``devices``.
        metric_texts: number of the tasks' texts to compute metrics on, chosen by their content.
        views: number of views per text for LiDAR.
        store_dtype: ``"float32"``, or ``"float16"`` to halve the space on disk (``--half`` on the command line).
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
        devices: processes on this machine that share the work, on Lightning Fabric.
        num_nodes: number of machines that share the work.
    """

    scoring: Scoring = "together"
    workers: int | None = None
    metric_texts: int = 64
    views: int = 16
    store_dtype: StoreDtype = "float32"
    token_budget: TokenBudget = "auto"
    devices: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for name, unit in {"metric_texts": "texts", "views": "", "devices": "", "num_nodes": ""}.items():
            setattr(self, name, validation.check_count(name, getattr(self, name), unit))
        if self.workers is not None:
            self.workers = validation.check_count("workers", self.workers, "processes")
        self.token_budget = check_budget(self.token_budget)
        validation.check_choice("store_dtype", self.store_dtype, ("float32", "float16"))
        validation.check_choice("scoring", self.scoring, get_args(Scoring))


@dataclass(kw_only=True)
class SweepRequest:
    """The arguments of :func:`~midlayer_encoders.sweep` except the model, the tasks and the recipes."""

    layers: Sequence[Layer] | str = "all"
    dims: Sequence[int] = ()
    precisions: Sequence[Precision] = ()
    metrics: str | Sequence[str] = ()
    baselines: bool = True
    out: Path | str | None = None
    store: Path | str | None = None
    progress: Progress | None = None
    settings: SweepSettings = field(default_factory=SweepSettings)

    def __post_init__(self) -> None:
        self.compressions = make_compressions(self.dims, self.precisions)
        self.baselines = validation.check_flag("baselines", self.baselines)
        validation.check_path("out", self.out)
        if self.out is not None:
            check_output_folder(Path(self.out))
        validation.check_path("store", self.store)
        validation.check_progress(self.progress)
        if self.has_metrics:
            metric_names(self.metrics)  # rejects an unknown name before a task runs
        else:
            counts = {name: getattr(self.settings, name) for name in ("metric_texts", "views")}
            validation.check_effect(SweepSettings, "without `metrics`", **counts)

    @property
    def has_metrics(self) -> bool:
        """Whether metrics are requested."""
        return not (self.metrics is None or (isinstance(self.metrics, list | tuple) and not self.metrics))

    def recipes(self, recipes: Any) -> list[Recipe] | None:
        """Return the recipes to sweep; none for a sweep that compares neither recipes nor compressions."""
        if recipes is None and len(self.compressions) == 1:
            return None
        return recipes_of("recipes", PLAIN if recipes is None else recipes)

    def folder(self, encoder: LayerEncoder) -> Path:
        """Return the folder of the results."""
        if self.out is not None:
            return Path(self.out)
        return Path("midlayer-results") / re.sub(r"[^\w.-]+", "_", encoder.name)
