"""Charts of scores by layer: the average, each task, and each recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import Baselines, Curve, Summary, average_baseline, summary
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import number, signed
from midlayer_encoders.report.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PLAIN = "plain"


def plot_scores(frame: pl.DataFrame) -> Figure:
    """Return a figure of the average score by layer and a panel for each task, with the best and last layer marked.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_scores(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> figure.axes[0].get_title(loc="left")
        'STS (spearman): best 60.0 at layer 1, +10.0 points over the last'
    """
    return plot_summary(_score_summary(frame, "scores"))


def plot_summary(scores: Summary, baselines: Baselines | None = None, costs: Mapping[int, str] | None = None) -> Figure:
    """Return the figure of :func:`plot_scores`, without axes for an average if no layer was scored on every task.

    Args:
        scores: of one model.
        baselines: drawn as levels.
        costs: text about the costs of each layer, for its tooltip.
    """
    baselines = baselines or {}
    tasks = scores.tasks if len(scores.tasks) > 1 else ()
    figure, (head, *panels) = drawing.panel_grid(1 + len(tasks), head=True)
    average = scores.average if tasks else scores.tasks[0]
    if average is None:
        head.set_axis_off()
        drawing.set_title(head, "no layer was scored on every task: no average", large=True)
    else:
        subject = f"average of {len(tasks)} tasks" if tasks else f"{average.name} ({average.measure})"
        means = {name: average_baseline(scores, by_task) for name, by_task in baselines.items()}
        title = f"{subject}: {_curve_text(average)}"
        _draw_curve(head, average, scores.num_layers, means, costs, title=title)
    for axes, task in zip(panels, tasks, strict=True):
        points = {name: 100 * by_task.get(task.name, math.nan) for name, by_task in baselines.items()}
        _draw_curve(axes, task, scores.num_layers, points, costs)
    return drawing.finish(figure, y_label="points (score × 100)")


def plot_heatmap(frame: pl.DataFrame) -> Figure:
    """Return a heat map of layers by tasks: how many points each layer is below the task's best layer.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_heatmap(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [[float(round(value, 1)) for value in row] for row in figure.axes[0].collections[0].get_array()]
        [[20.0, 0.0, 10.0]]
    """
    losses = task_losses(_score_summary(frame, "layers by tasks"))
    size = (max(6.0, 3.0 + 0.24 * len(losses.layers)), 1.3 + 0.26 * len(losses.curves))
    figure, (axes,) = drawing.panel_grid(1, size=size)
    _draw_losses(axes, losses, "points below each task's best layer (ringed)")
    return drawing.finish(figure)


def plot_recipes(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> Figure:
    """Return a figure of each recipe's average by layer, and a heat map of the points below the best layer of all."""
    figure, (curves, heat) = drawing.panel_grid(2, columns=1, size=(7.0, 2.6))
    _draw_recipes(curves, recipes, baselines)
    title = "points below the best recipe and layer (each recipe's best layer is ringed)"
    _draw_losses(heat, recipe_losses(recipes), title)
    return drawing.finish(figure)


def plot_recipe_curves(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> Figure:
    """Return a curve for each recipe, with the best layer of the best recipe marked, and a level for each baseline."""
    figure, (axes,) = drawing.panel_grid(1)
    _draw_recipes(axes, recipes, baselines)
    return drawing.finish(figure)


@dataclass(frozen=True)
class Losses:
    """How many points each layer of several curves is below the best.

    Attributes:
        curves: by name.
        best: the best value of all curves; None to compare each curve with its own best.
        apart: whether the first curve is separate from the others, which determine the color scale.
    """

    curves: Mapping[str, Curve]
    best: float | None = None
    apart: bool = False

    @cached_property
    def layers(self) -> list[int]:
        """All layers that were scored."""
        return sorted(set().union(*(curve.points for curve in self.curves.values())))

    @property
    def ticks(self) -> tuple[list[int], list[str]]:
        """Places and texts of the ticks of the layers."""
        return drawing.place_ticks(self.layers, 9)

    @cached_property
    def values(self) -> list[list[float]]:
        """A row for each curve, a column for each layer; NaN where it was not scored."""
        return [[self.below(curve, layer) for layer in self.layers] for curve in self.curves.values()]

    @cached_property
    def widest(self) -> float:
        """The end of the color scale: the 90th percentile, so that one bad layer does not hide the others."""
        return max(float(np.nanquantile(self.values[self.apart :], 0.9)), 1.0)

    @property
    def incomplete(self) -> bool:
        """Whether a layer of a curve was not scored."""
        return bool(np.isnan(self.values).any())

    def below(self, curve: Curve, layer: int) -> float:
        """Return how many points a layer of a curve is below the best."""
        return (curve.best if self.best is None else self.best) - curve.points.get(layer, math.nan)


def task_losses(scores: Summary) -> Losses:
    """Return how many points each layer is below the task's best layer, for the average and each task."""
    apart = scores.average is not None and len(scores.tasks) > 1
    curves = [scores.average, *scores.tasks] if scores.average and apart else scores.tasks
    return Losses({curve.name: curve for curve in curves}, apart=apart)


def recipe_losses(recipes: Mapping[str, Summary]) -> Losses:
    """Return how many points each layer of each recipe is below the best layer of all recipes."""
    averages = _averages(recipes)
    return Losses(averages, averages[best_recipe(recipes)].best)


def average_texts(scores: Summary, baselines: Baselines) -> list[str]:
    """Return the name and average of each baseline that was scored on every task."""
    means = {name: average_baseline(scores, by_task) for name, by_task in baselines.items()}
    return [f"{name} {number(mean)}" for name, mean in means.items() if mean is not None]


def draw_average_levels(axes: Axes, scores: Summary, baselines: Baselines) -> None:
    """Draw the average of each baseline that was scored on every task, with its value in the legend."""
    for style, (name, by_task) in enumerate(baselines.items()):
        mean = average_baseline(scores, by_task)
        if mean is not None:
            text = f"{name} {number(mean)}"
            drawing.draw_level(axes, mean, text, text, style)


def best_recipe(recipes: Mapping[str, Summary]) -> str:
    """Return the recipe whose best layer has the highest average; ties go to the first."""
    averages = _averages(recipes)
    return max(averages, key=lambda name: averages[name].best)


def recipe_words(recipes: Mapping[str, Summary]) -> str:
    """Return a sentence about the gain of the best recipe."""
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    best = averages[winner]
    text = f"{winner} at layer {best.best_layer} of {recipes[winner].num_layers} scores {number(best.best)}"
    plain = averages.get(_PLAIN)
    if plain is None:
        return f"{text}, {number(best.gain)} points more than at its last layer."
    if winner == _PLAIN:
        return f"{text}: no recipe is better than the plain text here."
    return (
        f"{text}: {number(best.best - plain.best)} points more than the best layer of the plain text "
        f"({plain.best_layer}, {number(plain.best)}), {number(best.best - plain.last)} more than its last."
    )


def recipe_rows(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> list[list[str]]:
    """Return a table of the average and each task at each recipe's best layer, with the baselines below."""
    averages = _averages(recipes)
    winner = recipes[best_recipe(recipes)]
    tasks = [task.name for task in winner.tasks]
    plain = averages.get(_PLAIN)
    rows = [["recipe", "best layer", "average", *(["gain over plain"] if plain else []), *tasks]]
    for name, average in averages.items():
        curves = {task.name: task for task in recipes[name].tasks}
        gain = [signed(average.best - plain.best)] if plain else []
        cells = [number(curves[task].points.get(average.best_layer)) if task in curves else "" for task in tasks]
        rows.append([name, str(average.best_layer), number(average.best), *gain, *cells])
    for name, scores in (baselines or {}).items():
        mean = average_baseline(winner, scores)
        if any(task in scores for task in tasks):
            gain = ["" if mean is None else signed(mean - plain.best)] if plain else []
            cells = [number(100 * scores[task]) if task in scores else "" for task in tasks]
            rows.append([name, "", "" if mean is None else number(mean), *gain, *cells])
    return rows


def _score_summary(frame: pl.DataFrame, subject: str) -> Summary:
    scores = summary(frame)
    if not scores.tasks:
        raise OptionError(f"`frame` must have rows of kind 'score' to plot {subject}, but got none.")
    return scores


def _draw_curve(
    axes: Axes,
    curve: Curve,
    num_layers: int,
    levels: Mapping[str, float | None],
    costs: Mapping[int, str] | None,
    *,
    title: str = "",
) -> None:
    """Draw a curve with its best and last layer and with levels; a title makes it large, with texts at the marks."""
    large = bool(title)
    level_texts = []
    for style, (name, level) in enumerate(levels.items()):
        if level is not None and math.isfinite(level):
            level_texts.append(f"{name} {number(level)}")
            drawing.draw_level(axes, level, level_texts[-1], name, style)
    x = list(curve.points)
    y = list(curve.points.values())
    drawing.draw_points(axes, x, y, tips=drawing.point_tips(curve.name, x, y, number, costs=costs))
    differ = curve.best_layer != curve.last_layer
    if differ:
        drawing.draw_mark(axes, "last", curve.last_layer, curve.last, f"last: {number(curve.last)}", large=large)
    best_text = f"layer {curve.best_layer}: {number(curve.best)}"
    drawing.draw_mark(axes, "best", curve.best_layer, curve.best, best_text, large=large)
    drawing.layer_axis(axes, num_layers)
    drawing.value_axis(axes, pad=0.16 if large else 0.08)
    if large and differ:  # a dotted line from the best mark to the last one, and the difference
        drawing.write(axes, signed(curve.gain), (curve.last_layer, curve.best), (14, -4), bold=True)
        right = curve.last_layer + 0.015 * max(num_layers, 1)
        corners = [curve.best_layer, right, right], [curve.best, curve.best, curve.last]
        axes.plot(*corners, ":", color=LIGHT["best"], linewidth=1.2)
    label = (
        f"{curve.name} by layer: best {number(curve.best)} at layer {curve.best_layer}, "
        f"{number(curve.last)} at the last, layer {curve.last_layer}" + "".join(f"; {text}" for text in level_texts)
    )
    caption = [curve.measure, f"best {number(curve.best)} at {curve.best_layer}"]
    if differ:
        caption.append(f"last {number(curve.last)} ({signed(-curve.gain)})")
    drawing.set_title(axes, title or curve.name, label, () if large else [*caption, *level_texts], large=large)


def _curve_text(curve: Curve) -> str:
    if len(curve.points) == 1:
        return f"{number(curve.best)} at layer {curve.best_layer}"
    if curve.best_layer == curve.last_layer:
        return f"the last layer is best, {number(curve.best)}"
    return f"best {number(curve.best)} at layer {curve.best_layer}, {signed(curve.gain)} points over the last"


def _draw_losses(axes: Axes, losses: Losses, title: str) -> None:
    peaks = [losses.layers.index(curve.best_layer) for curve in losses.curves.values()]
    mesh = drawing.draw_cells(axes, losses.values, 0, losses.widest, peaks=peaks, falling=True)
    drawing.row_axis(axes, list(losses.curves))
    axes.grid(visible=False)
    drawing.draw_scale(mesh, [axes], capped=True)
    if losses.apart:
        axes.axhline(0.5, color=LIGHT["page"], linewidth=3)
    axes.set_xticks(*losses.ticks)
    axes.set_xlabel("layer")
    drawing.set_title(axes, title)


def _draw_recipes(axes: Axes, recipes: Mapping[str, Summary], baselines: Baselines | None) -> None:
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    for style, (name, curve) in enumerate(averages.items()):
        x = list(curve.points)
        y = list(curve.points.values())
        tips = drawing.point_tips(name, x, y, number)
        drawing.draw_points(axes, x, y, label=name, style=style, tips=tips)
    draw_average_levels(axes, recipes[winner], baselines or {})
    best = averages[winner]
    mark_text = f"{winner}, layer {best.best_layer}: {number(best.best)}"
    drawing.draw_mark(axes, "best", best.best_layer, best.best, mark_text)
    drawing.layer_axis(axes, max(scores.num_layers for scores in recipes.values()))
    drawing.value_axis(axes, pad=0.12)
    tasks = recipes[winner].tasks
    title = tasks[0].name if len(tasks) == 1 else f"average of {len(tasks)} tasks"
    texts = [f"{name}: best {number(curve.best)} at layer {curve.best_layer}" for name, curve in averages.items()]
    label = "; ".join([*texts, *average_texts(recipes[winner], baselines or {})])
    drawing.set_title(axes, f"{title}, points", label)


def _averages(recipes: Mapping[str, Summary]) -> dict[str, Curve]:
    averages = {name: scores.average for name, scores in recipes.items() if scores.average is not None}
    if not averages:
        raise OptionError("No layer of any recipe was scored on every task, so none is the best.")
    return averages
