"""What tuning found: scores and metrics of every layer before and after, the losses, the page, the plain folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.report.results import Result
from midlayer_encoders.report.tuning_page import plot_tuning, tuning_html, tuning_words
from midlayer_encoders.tuning.training import Trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TuneResult"]


@dataclass(frozen=True)
class TuneResult(Result):
    """An encoder that was cut and tuned.

    Attributes:
        frame: tidy: the scores of every layer, ``revision`` is ``"before"`` or ``"after"``.
        folder: of everything that was written.
        encoder: the tuned encoder.
        trained: the losses and the callback's metrics by step.
        how: how it was made.
        notes: what a reader should know, such as tasks that failed.
    """

    folder: Path
    encoder: LayerEncoder
    trained: Trained
    how: Mapping[str, str]
    notes: Sequence[str] = ()

    made_by: ClassVar[str] = "tune"

    @property
    def model_folder(self) -> Path:
        """The tuned encoder as a plain folder, which any ``SentenceTransformer`` loads."""
        return self.folder / "model"

    def words(self) -> str:
        """Return what changed, in a sentence or two."""
        return tuning_words(self.frame, self.trained.losses)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores`` where there are tasks."""
        return {} if self.frame.is_empty() else {"scores": plot_tuning(self.frame)}

    def html(self) -> str:
        """Return the self-contained page."""
        name, layer = self.encoder.name, self.encoder.layer
        return tuning_html(
            self.frame, self.trained.losses, self.trained.metrics, how=self.how, notes=self.notes,
            title=f"{name} cut at layer {layer} of {self.encoder.num_layers} and tuned", folder=str(self.model_folder),
        )  # fmt: skip

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return the frames by file name."""
        return {"frame.parquet": self.frame, "frame.csv": self.frame, "losses.csv": self.trained.losses}
