"""The gain of a layer over another, with the interval of a paired bootstrap over test items."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import read_parquet
from midlayer_encoders.frame.summaries import Summary

RESAMPLES_SCHEMA: dict[str, pl.DataType] = {
    "dataset": pl.String(),
    "layer": pl.Int64(),
    "values": pl.List(pl.Float32()),
}
"""Columns of a frame of scores on resampled test items, one list per task and layer."""


@dataclass(frozen=True)
class Gain:
    """Points of a layer above another.

    Attributes:
        points: the difference of their scores.
        low: lower end of its 95 % interval; NaN if there is none.
        high: upper end.
        without: tasks whose scores were not resampled, so that there is no interval.
    """

    points: float
    low: float = math.nan
    high: float = math.nan
    without: tuple[str, ...] = ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the interval; ``None`` if there is none."""
        return None if self.without else (self.low, self.high)

    @property
    def separable(self) -> bool:
        """True if the interval excludes zero."""
        return self.low > 0 or self.high < 0


def paired_gain(
    scores: Summary,
    resamples: pl.DataFrame,
    *,
    layer: int | None = None,
    over: int | None = None,
    other: tuple[Summary, pl.DataFrame] | None = None,
) -> Gain:
    """Return the gain of a layer in the average over tasks, with the central 95 % of its differences in resamples.

    Args:
        scores: of all layers.
        resamples: frame of :data:`RESAMPLES_SCHEMA` for the same tasks.
        layer: the best by default.
        over: the last by default.
        other: scores and resamples that have the layer ``over``, if they are others.

    Example:
        >>> from midlayer_encoders.frame.summaries import Curve
        >>> curve = Curve("STS", "spearman", {0: 20.0, 1: 30.0, 2: 25.0})
        >>> rows = [("STS", layer, [curve.points[layer] / 100 + x for x in (-0.1, 0.0, 0.1)]) for layer in range(3)]
        >>> frame = pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row")
        >>> gain = paired_gain(Summary("m", "main", 2, (curve,), curve, (), ()), frame)
        >>> gain.points, round(gain.low, 4), round(gain.high, 4), gain.separable
        (5.0, 5.0, 5.0, True)
    """
    other_scores, other_resamples = other or (scores, resamples)
    first, second = scores.average, other_scores.average
    if first is None or second is None:
        raise OptionError("A gain needs a layer that was scored on every task: see `failures`, or sweep again.")
    layer = first.best_layer if layer is None else layer
    over = second.last_layer if over is None else over
    for name, number, curve in (("layer", layer, first), ("over", over, second)):
        if number not in curve.points:
            scored = ", ".join(map(str, curve.points))
            raise OptionError(f"`{name}` must be a layer that was scored on every task ({scored}), but got {number}.")
    points = first.points[layer] - second.points[over]
    samples = _by_task(resamples, layer)
    other_samples = _by_task(other_resamples, over)
    tasks = list(dict.fromkeys(task.name for task in (*scores.tasks, *other_scores.tasks)))
    without = tuple(task for task in tasks if task not in samples or task not in other_samples)
    if without:
        return Gain(points, without=without)
    size = min(len(values[task]) for values in (samples, other_samples) for task in tasks)
    differences = [np.subtract(samples[task][:size], other_samples[task][:size]) for task in tasks]
    means = 100 * np.mean(differences, axis=0)
    defined = means[np.isfinite(means)]  # the few items of a resample may all be equal
    if not len(defined):
        return Gain(points, without=tuple(tasks))
    low, high = np.quantile(defined, [0.025, 0.975])
    return Gain(points, float(low), float(high))


def score_interval(scores: Summary, resamples: pl.DataFrame, layer: int) -> tuple[float, float] | None:
    """Return the central 95 % of a layer's average score in resamples, in points; ``None`` if a task has none."""
    samples = _by_task(resamples, layer)
    if not scores.tasks or any(task.name not in samples for task in scores.tasks):
        return None
    size = min(len(samples[task.name]) for task in scores.tasks)
    means = 100 * np.mean([samples[task.name][:size] for task in scores.tasks], axis=0)
    defined = means[np.isfinite(means)]
    return (float(np.quantile(defined, 0.025)), float(np.quantile(defined, 0.975))) if len(defined) else None


def read_resamples(path: Path) -> pl.DataFrame:
    """Return the frame of :data:`RESAMPLES_SCHEMA` in a parquet file."""
    frame, _ = read_parquet(path)
    return frame.select(RESAMPLES_SCHEMA.keys()).cast(RESAMPLES_SCHEMA)  # type: ignore[arg-type]


def _by_task(resamples: pl.DataFrame, layer: int) -> dict[str, list[float]]:
    return dict(resamples.filter(pl.col("layer") == layer).select("dataset", "values").iter_rows())
