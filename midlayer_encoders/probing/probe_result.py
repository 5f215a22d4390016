"""What probing found: accuracy by layer with intervals, as a frame, a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders.frame import tidy_frame, tidy_rows
from midlayer_encoders.probing.heads import Kind
from midlayer_encoders.probing.splits import wilson
from midlayer_encoders.report import report_html
from midlayer_encoders.report.layer_charts import plot_probes
from midlayer_encoders.report.results import Result
from midlayer_encoders.selection.mixture import Mixture
from midlayer_encoders.selection.ridge import resampled_means

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ProbeResult"]


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Result):
    """How well a probe on each layer names the class of examples that it was not trained on.

    Attributes:
        frame: tidy, a score of each layer, whose dataset says which probe gave it.
        folder: where :meth:`save` writes; ``None`` where it must be given.
        model: its name.
        revision: of the model.
        num_layers: its number of blocks.
        layers: which layers were probed.
        kind: of the probe.
        dataset: what the examples are called.
        classes: names of the classes.
        right: whether each layer is right about each test example, shape ``(L, M)``.
        validation: accuracy of each layer on the examples that chose the epoch, shape ``(L,)``.
        epochs: of each layer's best epoch, ``0`` where nothing is trained, shape ``(L,)``.
        chance: accuracy of always naming the commonest class of the test examples.
        num_train: number of training examples.
        mixture: a mean of layers learned from labels, and its score; ``None`` unless it was asked for.
    """

    frame: pl.DataFrame = field(init=False, repr=False)
    folder: Path | None = None
    model: str
    revision: str
    num_layers: int
    layers: Sequence[int]
    kind: Kind
    dataset: str
    classes: Sequence[str]
    right: Tensor
    validation: Tensor
    epochs: Tensor
    chance: float
    num_train: int
    mixture: Mixture | None = None

    made_by: ClassVar[str] = "probe"

    def __post_init__(self) -> None:
        values = dict(zip(self.layers, self.accuracy.tolist(), strict=True))
        dataset = f"{self.dataset} ({self.kind} probe)"
        rows = tidy_rows(values, self, kind="score", dataset=dataset, name="accuracy")
        object.__setattr__(self, "frame", tidy_frame(rows))

    @property
    def accuracy(self) -> Tensor:
        """Accuracy on the test examples, shape ``(L,)``."""
        return self.right.double().mean(dim=1)

    @property
    def best_layer(self) -> int:
        """The layer with the highest accuracy on the validation examples; of equal ones the lowest."""
        return self.layers[int(self.validation.argmax())]

    def gain(self, *, seed: int = 0) -> tuple[float, float, float]:
        """Return by how much the best layer is above the last on the test examples, and its 95 % interval.

        The layer was chosen on other examples, so choosing does not flatter it. The interval resamples the test
        examples, the same for both layers.
        """
        best, last = self.layers.index(self.best_layer), len(self.layers) - 1
        draws = resampled_means(self.right[[best, last]], seed=seed)
        low, high = torch.quantile(draws[:, 0] - draws[:, 1], torch.tensor([0.025, 0.975], dtype=torch.float64))
        return float(self.accuracy[best] - self.accuracy[last]), float(low), float(high)

    def verdict(self) -> str:
        """Return in a sentence which layer validation chooses, and what it gains over the last on the test examples."""
        gain, low, high = (100 * value for value in self.gain())
        return (
            f"By validation, layer {self.best_layer} of {self.num_layers} is the choice for the {self.kind} probe: "
            f"{gain:+.1f} points from the last layer probed on the test examples "
            f"(95 % interval {low:+.1f} to {high:+.1f})."
        )

    def sentences(self) -> list[str]:
        """Return the verdict, and what a mixture of layers gains where one was learned."""
        return [self.verdict(), *([self.mixture.verdict()] if self.mixture is not None else [])]

    @property
    def table(self) -> pl.DataFrame:
        """Accuracy of each layer with its interval (Wilson, 95 %), the validation accuracy and the best epoch."""
        count = self.right.shape[1]
        bounds = [wilson(int(right), count) for right in self.right.sum(dim=1).tolist()]
        return pl.DataFrame(
            {
                "layer": list(self.layers),
                "accuracy": self.accuracy.tolist(),
                "low": [low for low, _ in bounds],
                "high": [high for _, high in bounds],
                "validation": self.validation.tolist(),
                "epoch": self.epochs.tolist(),
            }
        )

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return frame and table by file name, and the mixture's weights where there is one."""
        made = {"probe.parquet": self.frame, "probe.csv": self.table}
        if self.mixture is not None:
            weights = {"layer": list(self.mixture.layers), "weight": list(self.mixture.weights)}
            made["mixture.csv"] = pl.DataFrame(weights)
        return made

    def plot(self) -> Figure:
        """Return the figure of accuracy by layer with its interval, and the level of guessing."""
        label = f"{self.model}, {self.kind} probe"
        return plot_probes({label: self.table}, num_layers=self.num_layers, chance=self.chance, title=self.dataset)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``probe``."""
        return {"probe": self.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        how = {
            "Probe": f"{self.kind}, all layers trained together on the same batches, each at its best epoch",
            "Examples": f"{self.num_train} to train, {self.right.shape[1]} to test, {len(self.classes)} classes",
        }
        return report_html(
            self.frame, title=f"Probes of every layer: {self.dataset}", how=how, notes=self.sentences(),
            baselines={"Guessing": {self.frame["dataset"][0]: self.chance}},
        )  # fmt: skip
