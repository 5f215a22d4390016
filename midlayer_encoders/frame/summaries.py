"""Summaries of scores: the best layer on average and for each task, and its gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import polars as pl

from midlayer_encoders.frame.curves import curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import check_frame, check_one_model, number_of_layers
from midlayer_encoders.validation import check_choice

Baselines: TypeAlias = Mapping[str, Mapping[str, float]]
"""Score of each baseline on each task, a fraction."""


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

    def only(self, task: str) -> Summary:
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
        subject = f"Layer {incomplete[0]} was" if len(incomplete) == 1 else f"Layers {spans(incomplete)} were"
        remarks.append(f"{subject} scored on some tasks only and left out of the average.")
    if average is not None and len(average.points) > 1 and average.last_layer < num_layers:
        remarks.append(f"The last layer of the average is {average.last_layer}; the model's own last is {num_layers}.")
    return remarks


def spans(layers: tuple[int, ...]) -> str:
    """Return layers as text, with ranges shortened.

    Example:
        >>> spans((0, 1, 2, 5, 8, 9))
        '0 to 2, 5, 8, 9'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = (f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(texts)
