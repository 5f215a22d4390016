"""The result of probing: accuracy by layer with intervals, as a frame, a table, a figure and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from scipy.stats import binomtest
from torch import Tensor

from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.extras.probing.classifiers import ProbeKind
from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.metrics.label_accuracy import gain_interval
from midlayer_encoders.report import drawing, report_html
from midlayer_encoders.report.labels import format_signed
from midlayer_encoders.report.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion: ``right`` of ``count``.

    Unlike the normal approximation it stays within 0 and 1, and has a width if all or none are right.

    Example:
        >>> [round(bound, 3) for bound in wilson(81, 100)], [round(bound, 3) for bound in wilson(10, 10)]
        ([0.722, 0.875], [0.722, 1.0])
    """
    low, high = binomtest(right, count).proportion_ci(method="wilson")
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Result):
    """Accuracy of a probe on each layer for examples that it was not trained on.

    Attributes:
        frame: tidy, one score per layer; its dataset names the probe.
        folder: default folder of :meth:`save`.
        model: name of the model.
        revision: of the model.
        num_layers: number of blocks of the model.
        layers: the probed layers.
        kind: of the probe.
        dataset: name of the examples.
        classes: names of the classes.
        right: whether each layer is right about each test example, shape ``(L, M)``.
        validation: accuracy of each layer on the examples that chose the epoch, shape ``(L,)``.
        epochs: best epoch of each layer, shape ``(L,)``.
        chance: accuracy of always predicting the most common class of the test examples.
        num_train: number of training examples.
        source: the model as it was given.
        options: of the encoder; ``None`` for a module in memory, which no line creates.
    """

    frame: pl.DataFrame = field(init=False, repr=False)
    folder: Path | None = None
    model: str
    revision: str
    num_layers: int
    layers: Sequence[int]
    kind: ProbeKind
    dataset: str
    classes: Sequence[str]
    right: Tensor
    validation: Tensor
    epochs: Tensor
    chance: float
    num_train: int
    source: str = ""
    options: EncoderOptions | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        values = dict(zip(self.layers, self.accuracy.tolist(), strict=True))
        dataset = f"{self.dataset} ({self.kind} probe)"
        subject = NamedSubject(self.model, self.revision, self.num_layers)
        rows = tidy_rows(values, subject, kind="score", dataset=dataset, name="accuracy")
        object.__setattr__(self, "frame", tidy_frame(rows))

    @property
    def accuracy(self) -> Tensor:
        """Accuracy on the test examples, shape ``(L,)``."""
        return self.right.double().mean(dim=1)

    @property
    def best_layer(self) -> int:
        """The layer with the highest accuracy on the validation examples; the lowest of equal ones."""
        return self.layers[int(self.validation.argmax())]

    def gain(self, *, seed: int = 0) -> tuple[float, float, float]:
        """Return the gain of the best layer over the last on the test examples, and its 95 % interval.

        The layer was chosen on other examples, so the gain is unbiased. The interval resamples the test examples, the
        same for both layers.
        """
        best = self.layers.index(self.best_layer)
        low, high = gain_interval(self.right[best], self.right[-1], seed=seed)
        return float(self.accuracy[best] - self.accuracy[-1]), low, high

    def verdict(self) -> str:
        """Return a sentence that names the layer chosen by validation and its gain over the last layer."""
        gain, low, high = (100 * value for value in self.gain())
        return (
            f"By validation, layer {self.best_layer} of {self.num_layers} is the choice for the {self.kind} probe: "
            f"{format_signed(gain)} points over the last layer on the test examples "
            f"(95 % interval {format_signed(low)} to {format_signed(high)})."
        )

    @property
    def table(self) -> pl.DataFrame:
        """Accuracy of each layer with its interval (Wilson, 95 %), the validation accuracy and the best epoch."""
        count = self.right.shape[1]
        bounds = [wilson(int(num_right), count) for num_right in self.right.sum(dim=1).tolist()]
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
        """Return frame and table by file name."""
        return {"probe.parquet": self.frame, "probe.csv": self.table}

    def plot(self) -> Figure:
        """Return the figure of accuracy by layer in percent, with intervals, the best layer and the chance level."""
        table, best = self.table, self.layers.index(self.best_layer)
        x, y, low, high = table["layer"], *(100 * table[name] for name in ("accuracy", "low", "high"))
        figure, (axes,) = drawing.panel_grid(1, size=(7.2, 3.6))
        label = f"{self.model.removeprefix('local/')}, {self.kind} probe"
        drawing.draw_points(axes, x.to_list(), y.to_list(), label=label, band=(low.to_list(), high.to_list()))
        drawing.draw_points(axes, [x[best]], [y[best]], "disc")
        drawing.draw_level(axes, 100 * self.chance, f"guessing ({self.chance:.0%})")
        drawing.layer_axis(axes, self.num_layers)
        axes.set_ylabel("accuracy, %")
        drawing.set_title(axes, self.dataset)
        return drawing.finish(figure)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``probe``."""
        return {"probe": self.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        best, out = self.best_layer, f"layer-{self.best_layer}"
        tested = self.layers[int(self.accuracy.argmax())]
        note = f"The page marks layer {tested}, the best on the test examples, which the choice did not see."
        export = {}
        if self.options is not None:
            export["Python"] = f'{python_line(self.source, best, self.options)}.save_pretrained("{out}")'
            export["shell"] = shell_line(self.source, best, self.options, out=out)
        return report_html(
            self.frame,
            title=f"Probes of every layer: {self.dataset}",
            how={
                "Probe": f"{self.kind}, all layers trained together on the same batches, each at its best epoch",
                "Examples": f"{self.num_train} to train, {self.right.shape[1]} to test, {len(self.classes)} classes",
            },
            notes=[note] if tested != best else [],
            sentences=[self.verdict(), f"Guessing gives {100 * self.chance:.1f}."],
            export=export,
            baselines={"Guessing": {self.frame["dataset"][0]: self.chance}},
        )
