"""Scores over depth: the average and each task with best and last layer, and how far each layer is below the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import Baselines, Curve, Summary, average_baseline, summary
from midlayer_encoders.report.axes import Axis, layer_axis, named_axis, place_axis
from midlayer_encoders.report.charts import Cells, Chart, Level, Line, Mark, Panel, Scale, layer_tips, value_axis
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.ticks import number, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["average_levels", "average_panel", "losses_panel", "plot_heatmap", "plot_scores", "tasks_chart"]


def plot_scores(frame: pl.DataFrame) -> Figure:
    """Return a figure of the average score by layer and a panel for each task, best and last layer marked.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_scores(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> figure.axes[0].get_title(loc="left")
        'STS (spearman): best 60.0 at layer 1, +10.0 points over the last'
    """
    found = _scored(frame, "scores")
    tasks = tasks_chart(found).panels if len(found.tasks) > 1 else ()
    return draw(Chart((average_panel(found), *tasks), head=True, y_label="points (score × 100)"))


def plot_heatmap(frame: pl.DataFrame) -> Figure:
    """Return a figure of layers by tasks: how many points each layer is below the same task's best.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_heatmap(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [[float(round(value, 1)) for value in row] for row in figure.axes[0].images[0].get_array()]
        [[20.0, 0.0, 10.0]]
    """
    panel = losses_panel(_scored(frame, "layers by tasks"))
    size = (max(6.0, 3.0 + 0.24 * (panel.x.high + 0.5)), 1.3 + 0.26 * len(panel.y.ticks))
    return draw(Chart((panel,), size=size))


def average_panel(found: Summary, baselines: Baselines | None = None, costs: Mapping[int, str] | None = None) -> Panel:
    """Return the average by layer, or a title alone where no layer was scored on every task.

    Args:
        found: what the scores say.
        baselines: drawn as levels.
        costs: what each layer costs, in words, for who points at it.
    """
    average = found.average
    if average is None:
        return Panel("no layer was scored on every task: no average", layer_axis(0), Axis("", 0, 1), ())
    one = found.tasks[0] if len(found.tasks) == 1 else None
    title = f"{one.name} ({one.measure})" if one else f"average of {len(found.tasks)} tasks"
    base = average_levels(found, baselines or {})
    name = one.name if one else "average"
    title = f"{title}: {_curve_words(average)}"
    return _curve_panel(average, found.num_layers, base, name=name, title=title, pad=0.16, costs=costs)


def average_levels(found: Summary, baselines: Baselines) -> list[Level]:
    """Return the average of each baseline that was scored on every task."""
    return _levels({name: average_baseline(found, scores) for name, scores in baselines.items()})


def tasks_chart(found: Summary, baselines: Baselines | None = None, costs: Mapping[int, str] | None = None) -> Chart:
    """Return a panel for each task, on its own scale; arguments as in :func:`average_panel`."""
    known = {name: {task: 100 * score for task, score in of.items()} for name, of in (baselines or {}).items()}
    panels = []
    for task in found.tasks:
        levels = _levels({name: of.get(task.name) for name, of in known.items()})
        panels.append(_curve_panel(task, found.num_layers, levels, name=task.name, title=task.name, costs=costs))
    return Chart(tuple(panels))


def losses_panel(found: Summary) -> Panel:
    """Return how many points each layer is below the best of the same task, a row for the average and for each task."""
    rows = [found.average, *found.tasks] if found.average and len(found.tasks) > 1 else list(found.tasks)
    layers = sorted(set().union(*(task.points for task in found.tasks)))
    losses = [[curve.best - curve.points.get(layer, math.nan) for layer in layers] for curve in rows]
    # Colors end where nine in ten losses are within, so that one bad layer hides nothing.
    every = [loss for row, curve in zip(losses, rows, strict=True) if curve is not found.average for loss in row]
    widest = max(float(np.nanquantile(every, 0.9)), 1.0)
    cells = Cells(
        tuple(map(tuple, losses)),
        tuple(_loss_tips(curve, layers) for curve in rows),
        Scale(0, widest, ("0 below its best", f"{number(widest)} points or more below"), falling=True, capped=True),
        peaks=tuple(layers.index(curve.best_layer) for curve in rows),
        labels=tuple(f"{one.name}: best at layer {one.best_layer}, {number(one.best)} points" for one in rows),
        apart=len(rows) > len(found.tasks),
    )
    title, names = "points below each task's best layer (ringed)", [curve.name for curve in rows]
    return Panel(title, place_axis("layer", layers, 9), named_axis(names), (cells,))


def _scored(frame: pl.DataFrame, what: str) -> Summary:
    found = summary(frame)
    if not found.tasks:
        raise OptionError(f"`frame` must have rows of kind 'score' to plot {what}, but got none.")
    return found


def _levels(points: Mapping[str, float | None]) -> list[Level]:
    return [
        Level(value, f"{name} {number(value)}", label=name, style=style)
        for style, (name, value) in enumerate(points.items())
        if value is not None
    ]


def _curve_panel(
    curve: Curve,
    num_layers: int,
    levels: Sequence[Level],
    *,
    name: str,
    title: str,
    pad: float = 0.08,
    costs: Mapping[int, str] | None = None,
) -> Panel:
    layers, values = tuple(curve.points), tuple(curve.points.values())
    line = Line(layers, values, tips=layer_tips(name, layers, values, number, costs))
    best = Mark("best", curve.best_layer, curve.best, f"layer {curve.best_layer}: {number(curve.best)}")
    last = Mark("last", curve.last_layer, curve.last, f"last: {number(curve.last)}")
    marks = (best,) if curve.best_layer == curve.last_layer else (last, best)
    parts = (*levels, line, *marks)
    label = (
        f"{name} by layer: best {number(curve.best)} at layer {curve.best_layer}, "
        f"{number(curve.last)} at the last, layer {curve.last_layer}" + "".join(f"; {level.text}" for level in levels)
    )
    words = _task_words(curve, levels) if title == name else ()
    return Panel(
        title, layer_axis(num_layers), value_axis(parts, pad=pad), parts, label, words, gain=signed(curve.gain)
    )


def _curve_words(curve: Curve) -> str:
    if len(curve.points) == 1:
        return f"{number(curve.best)} at layer {curve.best_layer}"
    if curve.best_layer == curve.last_layer:
        return f"the last layer is best, {number(curve.best)}"
    return f"best {number(curve.best)} at layer {curve.best_layer}, {signed(curve.gain)} points over the last"


def _task_words(task: Curve, levels: Sequence[Level]) -> tuple[str, ...]:
    words = [task.measure, f"best {number(task.best)} at {task.best_layer}"]
    if task.best_layer != task.last_layer:
        words.append(f"last {number(task.last)} ({signed(-task.gain)})")
    return (*words, *(level.text for level in levels))


def _loss_tips(curve: Curve, layers: Sequence[int]) -> tuple[str, ...]:
    tips = []
    for layer in layers:
        value = curve.points.get(layer)
        score = "not scored" if value is None else f"{number(value)}, {number(curve.best - value)} below its best"
        tips.append(f"{curve.name}, layer {layer}: {score}")
    return tuple(tips)
