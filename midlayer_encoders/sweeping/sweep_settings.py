"""The arguments of a sweep, validated before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from midlayer_encoders._deprecated import take_deprecated
from midlayer_encoders._types import READ_SITES, Layer, Progress, ReadSite
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import make_metrics
from midlayer_encoders.reading.batches import TokenBudget, check_budget
from midlayer_encoders.store import StoreDtype
from midlayer_encoders.validation import check_choice, check_count, check_effect, check_flag, check_path, check_progress

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

Scoring: TypeAlias = Literal["together", "mteb"]
"""Score all layers of a task at once and confirm some with mteb, or score every layer with mteb."""


@dataclass(kw_only=True)
class SweepSettings:
    """How a sweep scores, measures, stores and runs.

    Attributes:
        scoring: ``"together"`` scores all layers of a task at once, on the encoder's device, with mteb's results; mteb
            then confirms the best layer, the second best and the last, in rows of the kind ``"confirmed"``, and scores
            unusual tasks. ``"mteb"`` scores every layer with mteb.
        workers: processes that score layers with mteb; by default one per core, shared by ``devices``.
        metric_texts: number of the tasks' texts to compute metrics on, chosen by their content.
        views: number of views per text for LiDAR.
        store_dtype: ``"float32"``, or ``"float16"`` to halve the space on disk (``--half`` on the command line).
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
        compile: run the blocks through ``torch.compile``, which pays off for many texts.
        devices: processes on this machine that share the work, on Lightning Fabric.
        num_nodes: number of machines that share the work.
    """

    scoring: Scoring = "together"
    workers: int | None = None
    metric_texts: int = 64
    views: int = 16
    store_dtype: StoreDtype = "float32"
    token_budget: TokenBudget = "auto"
    compile: bool = False
    devices: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for name, unit in {"metric_texts": "texts", "views": "", "devices": "", "num_nodes": ""}.items():
            setattr(self, name, check_count(name, getattr(self, name), unit))
        if self.workers is not None:
            self.workers = check_count("workers", self.workers, "processes")
        self.token_budget = check_budget(self.token_budget)
        self.compile = check_flag("compile", self.compile)
        check_choice("store_dtype", self.store_dtype, ("float32", "float16"))
        check_choice("scoring", self.scoring, get_args(Scoring))

    @classmethod
    def with_deprecated(cls, settings: SweepSettings | None, keywords: MutableMapping[str, Any]) -> SweepSettings:
        """Return the settings, updated with fields that were passed as keywords, as in 0.2."""
        names = {field.name: f"settings.{field.name}" for field in fields(cls)}
        return replace(settings or cls(), **take_deprecated(keywords, names).get("settings", {}))


@dataclass(kw_only=True)
class SweepRequest:
    """The arguments of :func:`~midlayer_encoders.sweep` except the model, the tasks and the recipes."""

    layers: Sequence[Layer] | str = "all"
    site: ReadSite = "block"
    metrics: str | Sequence[str] = ()
    baselines: bool = True
    out: Path | str | None = None
    store: Path | str | None = None
    progress: Progress | None = None
    settings: SweepSettings = field(default_factory=SweepSettings)

    def __post_init__(self) -> None:
        self.baselines = check_flag("baselines", self.baselines)
        check_choice("site", self.site, READ_SITES)
        if self.settings.compile and self.site != "block":
            raise OptionError(
                f"`compile` must be False with site={self.site!r}: the inside of a compiled block cannot be read."
            )
        check_path("out", self.out)
        check_path("store", self.store)
        check_progress(self.progress)
        if self.has_metrics:
            make_metrics(self.metrics, [0])  # rejects an unknown name before a task runs
        else:
            counts = {name: getattr(self.settings, name) for name in ("metric_texts", "views")}
            check_effect(SweepSettings, "without `metrics`", **counts)

    @property
    def has_metrics(self) -> bool:
        """Whether metrics are requested."""
        return not (self.metrics is None or (isinstance(self.metrics, list | tuple) and not self.metrics))

    def folder(self, encoder: LayerEncoder) -> Path:
        """Return the folder of the results."""
        if self.out is not None:
            return Path(self.out)
        name = re.sub(r"[^\w.-]+", "_", encoder.name)
        return Path("midlayer-results") / (name if self.site == "block" else f"{name}-{self.site}")
