"""The result of tuning: scores of every layer before and after, the losses, and the folder of the tuned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.report.results import Result
from midlayer_encoders.report.tuning_page import plot_tuning, tuning_html, tuning_words
from midlayer_encoders.tuning.training import TrainingRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TuneResult(Result):
    """A cut and tuned encoder.

    Attributes:
        frame: tidy: the scores of every layer, ``revision`` is ``"before"`` or ``"after"``.
        folder: output folder.
        encoder: the tuned encoder.
        trained: the losses and the callback's metrics by step.
        how: settings of the run.
        notes: caveats, such as tasks that failed.
    """

    folder: Path
    encoder: LayerEncoder
    trained: TrainingRecord
    how: Mapping[str, str]
    notes: Sequence[str] = ()

    made_by: ClassVar[str] = "tune"

    @property
    def model_folder(self) -> Path:
        """The tuned encoder as a plain folder that any ``SentenceTransformer`` loads."""
        return self.folder / "model"

    def words(self) -> str:
        """Return a summary of the changes in one or two sentences."""
        return tuning_words(self.frame, self.trained.losses)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores`` if there are tasks."""
        return {} if self.frame.is_empty() else {"scores": plot_tuning(self.frame)}

    def html(self) -> str:
        """Return the self-contained page."""
        encoder = self.encoder
        return tuning_html(
            self.frame,
            self.trained.losses,
            self.trained.metrics,
            how=self.how,
            notes=self.notes,
            title=f"{encoder.name} cut at layer {encoder.layer} of {encoder.num_layers} and tuned",
            folder=str(self.model_folder),
        )

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return the frames by file name."""
        return {**super().tables(), "losses.csv": self.trained.losses}
