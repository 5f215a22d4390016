"""Charts by layer: scores, recipes, metrics, correlations with scores, probe accuracies and selections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import check_frame, metric_series, number_of_layers
from midlayer_encoders.frame.summaries import Baselines, Curve, Gain, Summary, average_baseline, summary
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import format_signed, interval_words, number, with_interval
from midlayer_encoders.report.style import LIGHT, SERIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLAIN = "plain"


def plot_scores(frame: pl.DataFrame) -> Figure:
    r"""Return a figure of the average score by layer and a panel for each task, with the best and last layer marked.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_scores(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> print(figure.axes[0].get_title(loc="left").replace("\N{NO-BREAK SPACE}", " "))
        STS
        spearman
        best 60.0 at 1 · last 50.0 (−10.0)
    """
    scores = summary(frame)
    if not scores.tasks:
        raise OptionError("`frame` must have rows of kind 'score' to plot scores, but got none.")
    return plot_summary(scores)


def plot_summary(scores: Summary, baselines: Baselines | None = None) -> Figure:
    """Return the figure of :func:`plot_scores`, without axes for an average if no layer was scored on every task.

    Args:
        scores: of one model.
        baselines: drawn as levels.
    """
    curves = list(scores.tasks)
    levels = {
        name: [100 * by_task.get(task.name, math.nan) for task in curves] for name, by_task in (baselines or {}).items()
    }
    if scores.average is not None and len(curves) > 1:
        curves.insert(0, replace(scores.average, name=f"average of {len(curves)} tasks"))
        for name, by_task in (baselines or {}).items():
            levels[name].insert(0, average_baseline(scores, by_task) or math.nan)
    has_head = len(curves) == 1 or scores.average is not None
    figure, panels = drawing.panel_grid(len(curves), head=has_head)
    for place, (axes, curve) in enumerate(zip(panels, curves, strict=True)):
        large = has_head and not place
        for style, (name, values) in enumerate(levels.items()):
            if math.isfinite(values[place]):
                drawing.draw_level(axes, values[place], name, style)
        drawing.draw_points(axes, list(curve.points), list(curve.points.values()))
        best, last = number(curve.best), number(curve.last)
        caption = f"best {best} at {curve.best_layer}"
        if curve.best_layer != curve.last_layer:
            drawing.draw_mark(axes, curve.last_layer, curve.last, best=False)
            caption += f" · last {last} ({format_signed(-curve.gain)})"
        drawing.draw_mark(axes, curve.best_layer, curve.best, f"layer {curve.best_layer}: {best}" if large else "")
        drawing.layer_axis(axes, scores.num_layers)
        drawing.value_axis(axes, pad=0.16 if large else 0.08)
        drawing.set_title(axes, curve.name, f"{curve.measure}\n{caption}", large=large)
    return drawing.finish(figure, y_label="points (score × 100)")


def plot_recipes(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> Figure:
    """Return a curve for each recipe, with the best layer of the best recipe marked, and a level for each baseline."""
    figure, (axes,) = drawing.panel_grid(1)
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    for style, (name, curve) in enumerate(averages.items()):
        drawing.draw_points(axes, list(curve.points), list(curve.points.values()), label=name, style=style)
    for style, (name, by_task) in enumerate((baselines or {}).items()):
        if (mean := average_baseline(recipes[winner], by_task)) is not None:
            drawing.draw_level(axes, mean, f"{name} {number(mean)}", style)
    drawing.draw_mark(axes, averages[winner].best_layer, averages[winner].best)
    drawing.layer_axis(axes, max(scores.num_layers for scores in recipes.values()))
    tasks = recipes[winner].tasks
    drawing.set_title(axes, tasks[0].name if len(tasks) == 1 else f"average of {len(tasks)} tasks")
    return drawing.finish(figure, y_label="points (score × 100)")


def best_recipe(recipes: Mapping[str, Summary]) -> str:
    """Return the recipe whose best layer has the highest average; ties go to the first."""
    averages = _averages(recipes)
    return max(averages, key=lambda name: averages[name].best)


#: Gains of each recipe's best layer over the best and the last layer of the plain text, or of itself without it.
RecipeGains: TypeAlias = Mapping[str, tuple[Gain, Gain]]


def recipe_words(recipes: Mapping[str, Summary], gains: RecipeGains | None = None) -> str:
    """Return a sentence about the gain of the best recipe."""
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    best, plain = averages[winner], averages.get(_PLAIN)
    text = f"{winner} at layer {best.best_layer} of {recipes[winner].num_layers} scores {number(best.best)}"
    over_best, over_last = (f" ({interval_words(gain)})" for gain in gains[winner]) if gains else ("", "")
    if plain is None:
        return f"{text}, {number(best.gain)} points more than at its last layer{over_last}."
    if winner == _PLAIN:
        return f"{text}: nothing else that was compared is better."
    return (
        f"{text}: {number(best.best - plain.best)} points more{over_best} than the best layer of the plain text "
        f"({plain.best_layer}, {number(plain.best)}), {number(best.best - plain.last)} more than its last{over_last}."
    )


def recipe_rows(
    recipes: Mapping[str, Summary], baselines: Baselines | None = None, gains: RecipeGains | None = None
) -> list[list[str]]:
    """Return a table of the average and each task at each recipe's best layer, with the baselines below."""
    averages = _averages(recipes)
    winner = recipes[best_recipe(recipes)]
    tasks = [task.name for task in winner.tasks]
    plain = averages.get(_PLAIN)
    rows = [["recipe", "best layer", "average", *(["gain over plain"] if plain else []), *tasks]]
    for name, average in averages.items():
        layer = average.best_layer
        points = {task.name: task.points.get(layer) for task in recipes[name].tasks}
        interval = gains[name][0] if gains and name != _PLAIN else None
        gain = [with_interval(average.best - plain.best, interval)] if plain else []
        rows.append([name, str(layer), number(average.best), *gain, *(number(points.get(task)) for task in tasks)])
    for name, scores in (baselines or {}).items():
        mean = average_baseline(winner, scores)
        gain = [number(None) if mean is None else format_signed(mean - plain.best)] if plain else []
        cells = [number(100 * scores[task]) if task in scores else number(None) for task in tasks]
        rows.append([name, "", number(mean), *gain, *cells])
    return rows


def _averages(recipes: Mapping[str, Summary]) -> dict[str, Curve]:
    averages = {name: scores.average for name, scores in recipes.items() if scores.average is not None}
    if not averages:
        raise OptionError("No layer of any recipe was scored on every task, so none is the best.")
    return averages


def plot_metrics(frame: pl.DataFrame, *, chosen: int | None = None) -> Figure:
    """Return a figure with a panel for each metric by layer and a color for each model and dataset.

    Models of different depth share an axis of relative depth.

    Args:
        frame: tidy results.
        chosen: a layer to mark.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "metric", "texts", "curvature", v) for k, v in enumerate([1.0, 2.0, 1.5])]
        >>> figure = plot_metrics(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['curvature']
    """
    frame = check_frame(frame)
    metrics = metric_series(frame)
    if not metrics:
        raise OptionError("`frame` must have rows of kind 'metric' to plot metrics, but got none.")
    labels = list(dict.fromkeys(series.label for many in metrics.values() for series in many))
    depths = {number_of_layers(part) for _, part in frame.group_by("model", "revision")} - {0}
    relative = len(depths) > 1
    panels = {
        name: [
            drawing.Line(
                series.depths if relative else series.layers, series.values, series.label, labels.index(series.label)
            )
            for series in many
        ]
        for name, many in metrics.items()
    }
    return drawing.plot_panels(panels, max(depths, default=0), relative=relative, chosen=chosen)


def gap_text(figure: Figure, reason: str = "Not finite at some layers") -> str:
    """Return a sentence, after a space, that names the panels whose curves have gaps; empty if there are none."""
    titles = [
        axes.get_title(loc="left")
        for axes in figure.axes
        if any(np.isnan(np.asarray(line.get_ydata(), dtype=float)).any() for line in axes.lines)
    ]
    return f" {reason}, and broken there: {', '.join(titles)}." if titles else ""


def plot_selection(
    frame: pl.DataFrame, *, layer: int, rule: str, choices: Mapping[str, int], num_layers: int
) -> Figure:
    """Return a figure of the layer that each rule selects, above a panel for each score and metric.

    Args:
        frame: tidy results of one model; may be empty.
        layer: the selected layer.
        rule: that selected it.
        choices: the layer that each rule selects.
        num_layers: number of blocks of the model.
    """
    curves = check_frame(frame).sort("kind", descending=True, maintain_order=True)  # scores before metrics
    groups = {key: rows.sort("layer") for key, rows in curves.group_by("kind", "name", "dataset", maintain_order=True)}
    figure, (head, *panels) = drawing.panel_grid(1 + len(groups), head=True)
    colors = [LIGHT["best"] if name == rule else SERIES[0] for name in choices]
    head.bar_label(head.barh(list(choices), list(choices.values()), color=colors), fontsize=8, padding=3)
    head.set_ylim(len(choices) - 0.5, -0.5)
    drawing.set_title(head, f"layer {layer}, by {rule}", large=True)
    for axes, ((kind, name, dataset), rows) in zip(panels, groups.items(), strict=True):
        drawing.draw_points(axes, rows["layer"].to_list(), rows["value"].to_list())
        drawing.set_title(axes, f"{name}: {dataset}" if kind == "score" else str(name))
    for axes in figure.axes:
        drawing.draw_rule(axes, layer, chosen=True)
        drawing.layer_axis(axes, num_layers)
    return drawing.finish(figure)
