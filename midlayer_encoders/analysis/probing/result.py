"""What probing found: accuracy by layer with intervals, as a frame, a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from midlayer_encoders.analysis.probing.heads import Kind
from midlayer_encoders.analysis.probing.scoring import wilson
from midlayer_encoders.selection.ridge import resampled_means

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

__all__ = ["ProbeResult"]


@dataclass(frozen=True)
class ProbeResult:
    """How well a probe on each layer names the class of examples that it was not trained on.

    Attributes:
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
    """

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

    @property
    def frame(self) -> pl.DataFrame:
        """The tidy frame: a score of each layer, whose dataset says which probe gave it."""
        import polars as pl

        from midlayer_encoders.frame import FRAME_SCHEMA

        name = f"{self.dataset} ({self.kind} probe)"
        depth = max(self.num_layers, 1)
        rows = [
            (self.model, self.revision, layer, layer / depth, "score", name, "accuracy", value)
            for layer, value in zip(self.layers, self.accuracy.tolist(), strict=True)
        ]
        return pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")

    @property
    def table(self) -> pl.DataFrame:
        """Accuracy of each layer with its interval (Wilson, 95 %), the validation accuracy and the best epoch."""
        import polars as pl

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

    def plot(self) -> Figure:
        """Return the figure of accuracy by layer with its interval, and the level of guessing."""
        from midlayer_encoders.report.probes import plot_probes

        label = f"{self.model}, {self.kind} probe"
        return plot_probes({label: self.table}, num_layers=self.num_layers, chance=self.chance, title=self.dataset)
