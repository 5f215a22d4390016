"""Which layer is best, on average and for each task, and by how much: pure functions of the frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

from midlayer_encoders.frame.curves import curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import check_frame, check_one_model, number_of_layers

Baselines: TypeAlias = Mapping[str, Mapping[str, float]]
"""By its name, the score of each baseline on tasks, as fractions."""


@dataclass(frozen=True)
class Curve:
    """Scores by layer, in points (the fraction that mteb gives, times 100).

    Attributes:
        name: of the task, or ``average``.
        measure: of the score, such as ``cosine_spearman``.
        points: by layer, in order, at least one.
    """

    name: str
    measure: str
    points: Mapping[int, float]

    @property
    def best_layer(self) -> int:
        """The layer with the highest score; of equal ones the lowest, since it costs least."""
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
        """By how many points the best layer is above the last, never negative."""
        return self.best - self.last


@dataclass(frozen=True)
class Summary:
    """What the scores of one model say.

    Attributes:
        model: its name.
        revision: of the model.
        num_layers: its number of blocks.
        tasks: one curve each, in the frame's order.
        average: over all tasks, of the layers that were scored on every one; ``None`` where there is no such layer.
        incomplete: layers that were scored on some tasks only and are left out of the average.
        remarks: a sentence for each thing that is missing.
    """

    model: str
    revision: str
    num_layers: int
    tasks: tuple[Curve, ...]
    average: Curve | None
    incomplete: tuple[int, ...]
    remarks: tuple[str, ...]


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
    points = {task: {layer: 100 * one for layer, one in by.items()} for task, by in curves_by_dataset(scores).items()}
    tasks = tuple(Curve(task, measures[task], by) for task, by in points.items())
    mean = mean_curve(list(points.values()))
    average = Curve("average", "mean of the tasks' main scores", mean) if mean else None
    incomplete = tuple(sorted(set().union(*points.values()) - set(mean)))
    unscored = [task for task in measures if task not in points]
    num_layers = number_of_layers(frame)
    return Summary(
        model=model,
        revision=revision,
        num_layers=num_layers,
        tasks=tasks,
        average=average,
        incomplete=incomplete,
        remarks=tuple(_remarks(unscored, average, incomplete, num_layers)),
    )


def average_baseline(found: Summary, baselines: Mapping[str, float]) -> float | None:
    """Return the baseline's average in points, or ``None`` unless it was scored on every task."""
    if not found.tasks or not all(task.name in baselines for task in found.tasks):
        return None
    return 100 * math.fsum(baselines[task.name] for task in found.tasks) / len(found.tasks)


def _remarks(unscored: list[str], average: Curve | None, incomplete: tuple[int, ...], num_layers: int) -> list[str]:
    remarks = []
    if unscored:
        remarks.append(f"No layer has a finite score on {', '.join(unscored)}, which is left out.")
    if incomplete and average is None:
        remarks.append("No layer was scored on every task, so there is no average.")
    elif incomplete:
        which = f"Layer {incomplete[0]} was" if len(incomplete) == 1 else f"Layers {spans(incomplete)} were"
        remarks.append(f"{which} scored on some tasks only and left out of the average.")
    if average is not None and len(average.points) > 1 and average.last_layer < num_layers:
        remarks.append(f"The last layer of the average is {average.last_layer}; the model's own last is {num_layers}.")
    return remarks


def spans(layers: tuple[int, ...]) -> str:
    """Return layers in few words.

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
    words = (f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return ", ".join(words)
