"""Which layer is best, on average and for each task, and by how much: pure functions of the frame."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import check_frame, check_one_model, number_of_layers

__all__ = ["Curve", "Summary", "average_baseline", "spans", "summary"]


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
    names = scores["dataset"].unique(maintain_order=True).to_list()
    found = [_task_curve(name, scores.filter(pl.col("dataset") == name)) for name in names]
    tasks = tuple(curve for curve in found if curve.points)
    layers = sorted(set().union(*(curve.points for curve in tasks)))
    complete = [layer for layer in layers if all(layer in curve.points for curve in tasks)]
    incomplete = tuple(layer for layer in layers if layer not in complete)
    average = _average(tasks, complete) if complete else None
    num_layers = number_of_layers(frame)
    return Summary(
        model=model,
        revision=revision,
        num_layers=num_layers,
        tasks=tasks,
        average=average,
        incomplete=incomplete,
        remarks=tuple(_remarks(found, average, incomplete, num_layers)),
    )


def average_baseline(found: Summary, baselines: Mapping[str, float]) -> float | None:
    """Return the baseline's average in points, or ``None`` unless it was scored on every task."""
    if not found.tasks or not all(task.name in baselines for task in found.tasks):
        return None
    return 100 * math.fsum(baselines[task.name] for task in found.tasks) / len(found.tasks)


def _task_curve(task: str, scores: pl.DataFrame) -> Curve:
    measures = scores["name"].unique(maintain_order=True).to_list()
    if len(measures) > 1:
        raise OptionError(
            f"`frame` must have one score for each task, its main one, but got {', '.join(measures)} for {task!r}; "
            "filter the others out."
        )
    rows = scores.filter(pl.col("value").is_finite()).sort("layer")
    return Curve(task, measures[0], {layer: 100 * value for layer, value in rows.select("layer", "value").iter_rows()})


def _average(tasks: tuple[Curve, ...], layers: list[int]) -> Curve:
    points = {layer: math.fsum(task.points[layer] for task in tasks) / len(tasks) for layer in layers}
    return Curve("average", "mean of the tasks' main scores", points)


def _remarks(found: list[Curve], average: Curve | None, incomplete: tuple[int, ...], num_layers: int) -> list[str]:
    remarks = []
    unscored = [curve.name for curve in found if not curve.points]
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
