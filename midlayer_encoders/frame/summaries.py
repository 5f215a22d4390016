"""Summaries of scores: the best layer on average and for each task, and its gain over another, with an interval.

The interval comes from a paired bootstrap over test items.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.curves import curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import check_frame, check_one_model, number_of_layers, read_parquet
from midlayer_encoders.validation import check_choice

#: Score of each baseline on each task, a fraction.
Baselines: TypeAlias = Mapping[str, Mapping[str, float]]

#: Columns of a frame of scores on resampled test items, one list per task and layer.
RESAMPLES_SCHEMA: dict[str, pl.DataType] = {
    "dataset": pl.String(),
    "layer": pl.Int64(),
    "values": pl.List(pl.Float32()),
}


@dataclass(frozen=True)
class Curve:
    """Scores by layer, in points (mteb's fraction times 100).

    Attributes:
        name: of the task, or ``average``.
        measure: name of the score, such as ``cosine_spearman``.
        points: by layer, in ascending order; at least one.
    """

    name: str
    measure: str
    points: Mapping[int, float]

    @cached_property
    def best_layer(self) -> int:
        """The layer with the highest score; ties go to the lowest, which is the cheapest."""
        return max(self.points, key=lambda layer: (self.points[layer], -layer))

    @property
    def last_layer(self) -> int:
        """The deepest layer that was scored."""
        return max(self.points)

    @property
    def best(self) -> float:
        """The highest score."""
        return self.points[self.best_layer]

    @property
    def last(self) -> float:
        """The score of the deepest layer that was scored."""
        return self.points[self.last_layer]

    @property
    def gain(self) -> float:
        """Points of the best layer above the last; never negative."""
        return self.best - self.last


@dataclass(frozen=True)
class Summary:
    """The scores of one model.

    Attributes:
        model: name of the model.
        revision: of the model.
        num_layers: number of blocks.
        tasks: one curve each, in the order of the frame.
        average: over all tasks, of the layers that were scored on each of them; None if there is no such layer.
        incomplete: layers that were scored on only some tasks and are left out of the average.
        remarks: sentences about missing scores.
    """

    model: str
    revision: str
    num_layers: int
    tasks: tuple[Curve, ...]
    average: Curve | None
    incomplete: tuple[int, ...]
    remarks: tuple[str, ...]

    def only(self, task: str) -> Self:
        """Return the summary of one task."""
        curves = {curve.name: curve for curve in self.tasks}
        curve = curves[check_choice("task", task, curves)]
        return replace(self, tasks=(curve,), average=curve, incomplete=(), remarks=())


def summary(frame: pl.DataFrame) -> Summary:
    """Return the curve of each task and of their average, with best layer, last layer and gain in points.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> average = summary(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row")).average
        >>> average.best_layer, average.last_layer, round(average.gain, 2)
        (1, 2, 10.0)
    """
    frame = check_frame(frame)
    model, revision = check_one_model(frame)
    scores = frame.filter(pl.col("kind") == "score")
    measures = dict(scores.select("dataset", "name").unique(maintain_order=True).iter_rows())
    points = {
        task: {layer: 100 * score for layer, score in by_layer.items()}
        for task, by_layer in curves_by_dataset(scores).items()
    }
    tasks = tuple(Curve(task, measures[task], by_layer) for task, by_layer in points.items())
    mean = mean_curve(list(points.values()))
    average = Curve("average", "mean of the tasks' main scores", mean) if mean else None
    incomplete = tuple(sorted(set().union(*points.values()) - set(mean)))
    unscored = [task for task in measures if task not in points]
    num_layers = number_of_layers(frame)
    remarks = tuple(_remarks(unscored, average, incomplete, num_layers))
    return Summary(model, revision, num_layers, tasks, average, incomplete, remarks)


def average_baseline(scores: Summary, baseline: Mapping[str, float]) -> float | None:
    """Return the average of a baseline in points, or None if it was not scored on every task."""
    if not scores.tasks or not all(task.name in baseline for task in scores.tasks):
        return None
    return 100 * math.fsum(baseline[task.name] for task in scores.tasks) / len(scores.tasks)


def _remarks(unscored: list[str], average: Curve | None, incomplete: tuple[int, ...], num_layers: int) -> list[str]:
    remarks = []
    if unscored:
        remarks.append(f"No layer has a finite score on {', '.join(unscored)}, which is left out.")
    if incomplete and average is None:
        remarks.append("No layer was scored on every task, so there is no average.")
    elif incomplete:
        layers = ", ".join(map(str, incomplete))
        remarks.append(f"Layers that were scored on some tasks only are left out of the average: {layers}.")
    if average is not None and len(average.points) > 1 and average.last_layer < num_layers:
        remarks.append(f"The last layer of the average is {average.last_layer}; the model's own last is {num_layers}.")
    return remarks


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
    interval = _central_interval(100 * np.mean(differences, axis=0))
    return Gain(points, without=tuple(tasks)) if interval is None else Gain(points, *interval)


def baseline_gains(
    scores: Summary,
    resamples: pl.DataFrame,
    baselines: Baselines,
    baseline_resamples: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, Gain]:
    """Return the gain over the best layer of each baseline that was scored on every task, the best baseline first.

    Args:
        scores: of all layers.
        resamples: as in :func:`paired_gain`.
        baselines: score of each baseline on each task, a fraction.
        baseline_resamples: its scores on the same resampled items.
    """
    gains = {}
    for name, by_task in baselines.items():
        mean = average_baseline(scores, by_task)
        if mean is None or scores.average is None:
            continue
        tasks = tuple(replace(task, points={0: 100 * by_task[task.name]}) for task in scores.tasks)
        baseline = replace(scores, tasks=tasks, average=replace(scores.average, points={0: mean}))
        rows = [(task, 0, values) for task, values in baseline_resamples.get(name, {}).items() if values]
        frame = pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row")
        gains[name] = paired_gain(baseline, frame, over=scores.average.best_layer, other=(scores, resamples))
    return dict(sorted(gains.items(), key=lambda item: -item[1].points))


def score_interval(scores: Summary, resamples: pl.DataFrame, layer: int) -> tuple[float, float] | None:
    """Return the central 95 % of a layer's average score in resamples, in points; ``None`` if a task has none."""
    samples = _by_task(resamples, layer)
    if not scores.tasks or any(task.name not in samples for task in scores.tasks):
        return None
    size = min(len(samples[task.name]) for task in scores.tasks)
    return _central_interval(100 * np.mean([samples[task.name][:size] for task in scores.tasks], axis=0))


def _central_interval(means: npt.NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the central 95 % of the defined means: the few items of a resample may all be equal."""
    defined = means[np.isfinite(means)]
    return (float(np.quantile(defined, 0.025)), float(np.quantile(defined, 0.975))) if len(defined) else None


def read_resamples(path: Path) -> pl.DataFrame:
    """Return the frame of :data:`RESAMPLES_SCHEMA` in a parquet file."""
    frame, _ = read_parquet(path)
    return frame.select(RESAMPLES_SCHEMA.keys()).cast(RESAMPLES_SCHEMA)  # type: ignore[arg-type]


def _by_task(resamples: pl.DataFrame, layer: int) -> dict[str, list[float]]:
    return dict(resamples.filter(pl.col("layer") == layer).select("dataset", "values").iter_rows())
