"""The arguments of a sweep, checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from midlayer_encoders._types import READ_SITES, Layer, Progress, ReadSite
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import make_metrics
from midlayer_encoders.reading.batches import TokenBudget, check_budget
from midlayer_encoders.store import StoreDtype
from midlayer_encoders.validation import check_choice, check_count, check_flag, check_path, check_progress

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["METRIC_TEXTS", "Scoring", "Settings"]

METRIC_TEXTS = 64
"""Texts that metrics are measured on unless told otherwise."""

Scoring: TypeAlias = Literal["together", "mteb"]
"""How layers are scored: all of a task at once, with some confirmed by mteb, or one by one by mteb."""


@dataclass(kw_only=True)
class Settings:
    """The arguments of :func:`~midlayer_encoders.sweep` beside model and tasks, checked."""

    layers: Sequence[Layer] | str
    site: ReadSite
    metrics: str | Sequence[str]
    metric_texts: int
    views: int
    out: Path | str | None
    store: Path | str | None
    store_dtype: StoreDtype
    scoring: Scoring
    workers: int | None
    token_budget: TokenBudget
    compile: bool
    baselines: bool
    devices: int
    num_nodes: int
    progress: Progress | None

    def __post_init__(self) -> None:
        for name, what in {"metric_texts": "texts", "views": "", "devices": "", "num_nodes": ""}.items():
            setattr(self, name, check_count(name, getattr(self, name), what))
        self.token_budget = check_budget(self.token_budget)
        self.compile, self.baselines = check_flag("compile", self.compile), check_flag("baselines", self.baselines)
        if self.workers is not None:
            self.workers = check_count("workers", self.workers, "processes")
        check_choice("store_dtype", self.store_dtype, ("float32", "float16"))
        check_choice("scoring", self.scoring, get_args(Scoring))
        check_choice("site", self.site, READ_SITES)
        if self.compile and self.site != "block":
            raise OptionError(
                f"`compile` must be False with site={self.site!r}: inside a compiled block nothing can be read."
            )
        check_path("out", self.out)
        check_path("store", self.store)
        check_progress(self.progress)
        if self.measures:
            make_metrics(self.metrics, [0])  # a wrong name is refused before a task is run

    @property
    def measures(self) -> bool:
        """Whether metrics are asked for."""
        return not (self.metrics is None or (isinstance(self.metrics, list | tuple) and not self.metrics))

    def folder(self, encoder: LayerEncoder) -> Path:
        """Return where results go."""
        name = re.sub(r"[^\w.-]+", "_", encoder.name) + ("" if self.site == "block" else f"-{self.site}")
        return Path(self.out) if self.out is not None else Path("midlayer-results") / name
