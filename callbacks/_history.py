"""What a probe found at each step: kept in memory, in the run's checkpoints and in a file beside the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders.callbacks._probe import Values

if TYPE_CHECKING:
    import polars as pl

__all__ = ["History"]


@dataclass
class History:
    """The values of every layer by step and metric.

    Attributes:
        model: what the frame calls the model.
        num_layers: number of blocks.
        layers: which layers were measured.
        dataset: what the frame calls the probe's inputs.
        steps: step, then metric, then one value per layer; NaN where a layer has none.
    """

    model: str
    num_layers: int
    layers: Sequence[int]
    dataset: str
    steps: dict[int, Values] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the tidy frame; the revision names the step, as Pythia's do: ``step512``."""
        return [
            {
                "model": self.model,
                "revision": f"step{step}",
                "layer": layer,
                "depth": layer / self.num_layers,
                "kind": "metric",
                "dataset": self.dataset,
                "name": name,
                "value": value,
            }
            for step in sorted(self.steps)
            for name, values in self.steps[step].items()
            for layer, value in zip(self.layers, values, strict=True)
            if not math.isnan(value)  # the first layer of a comparison with the one before
        ]

    def frame(self) -> pl.DataFrame:
        """Return the tidy frame."""
        import polars as pl

        from midlayer_encoders.frame import FRAME_SCHEMA

        return pl.DataFrame(self.rows(), schema=FRAME_SCHEMA)

    def keep(self, wanted: Callable[[int], bool]) -> None:
        """Forget the steps that are not wanted."""
        self.steps = {step: values for step, values in self.steps.items() if wanted(step)}

    def write(self, path: Path) -> None:
        """Write the frame at once or not at all: a killed run leaves the one before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        self.frame().write_parquet(beside)
        beside.replace(path)

    def read(self, path: Path) -> None:
        """Take the steps of a file that :meth:`write` wrote."""
        import polars as pl

        for revision, name, layer, value in (
            pl.read_parquet(path).select("revision", "name", "layer", "value").iter_rows()
        ):
            values = self.steps.setdefault(int(revision.removeprefix("step")), {})
            if layer in self.layers:
                values.setdefault(name, [math.nan] * len(self.layers))[list(self.layers).index(layer)] = value
