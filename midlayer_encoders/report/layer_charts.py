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
from midlayer_encoders.report.labels import interval_words, number, signed, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
        spearman · best 60.0 at 1 · last 50.0 (−10.0)
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
    baselines = baselines or {}
    curves = list(scores.tasks)
    levels: list[dict[str, float | None]] = [
        {name: 100 * by_task.get(task.name, math.nan) for name, by_task in baselines.items()} for task in curves
    ]
    has_head = len(curves) == 1 or scores.average is not None
    if scores.average is not None and len(curves) > 1:
        curves.insert(0, replace(scores.average, name=f"average of {len(curves)} tasks"))
        levels.insert(0, {name: average_baseline(scores, by_task) for name, by_task in baselines.items()})
    figure, panels = drawing.panel_grid(len(curves), head=has_head)
    for place, (axes, curve) in enumerate(zip(panels, curves, strict=True)):
        _draw_curve(axes, curve, scores.num_layers, levels[place], large=has_head and not place)
    return drawing.finish(figure, y_label="points (score × 100)")


def plot_recipes(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> Figure:
    """Return a curve for each recipe, with the best layer of the best recipe marked, and a level for each baseline."""
    figure, (axes,) = drawing.panel_grid(1)
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    for style, (name, curve) in enumerate(averages.items()):
        drawing.draw_points(axes, list(curve.points), list(curve.points.values()), label=name, style=style)
    draw_average_levels(axes, recipes[winner], baselines or {})
    best = averages[winner]
    drawing.draw_mark(axes, "best", best.best_layer, best.best)
    drawing.layer_axis(axes, max(scores.num_layers for scores in recipes.values()))
    drawing.value_axis(axes, pad=0.12)
    tasks = recipes[winner].tasks
    title = tasks[0].name if len(tasks) == 1 else f"average of {len(tasks)} tasks"
    axes.set_ylabel("points (score × 100)")
    drawing.set_title(axes, title)
    return drawing.finish(figure)


def draw_average_levels(axes: Axes, scores: Summary, baselines: Baselines) -> None:
    """Draw the average of each baseline that was scored on every task, with its value in the legend."""
    means = {name: average_baseline(scores, by_task) for name, by_task in baselines.items()}
    for style, (name, mean) in enumerate((name, mean) for name, mean in means.items() if mean is not None):
        drawing.draw_level(axes, mean, f"{name} {number(mean)}", style)


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
    best = averages[winner]
    text = f"{winner} at layer {best.best_layer} of {recipes[winner].num_layers} scores {number(best.best)}"
    over_best, over_last = (f" ({interval_words(gain)})" for gain in gains[winner]) if gains else ("", "")
    plain = averages.get(_PLAIN)
    if plain is None:
        return f"{text}, {number(best.gain)} points more than at its last layer{over_last}."
    if winner == _PLAIN:
        if all(name == _PLAIN or name.startswith(f"{_PLAIN}, ") for name in averages):
            return f"{text}: no smaller vector is better than the whole one here."
        return f"{text}: no recipe is better than the plain text here."
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
        curves = {task.name: task for task in recipes[name].tasks}
        interval = gains[name][0] if gains and name != _PLAIN else None
        gain = [with_interval(average.best - plain.best, interval)] if plain else []
        cells = [number(curves[task].points.get(average.best_layer)) if task in curves else "" for task in tasks]
        rows.append([name, str(average.best_layer), number(average.best), *gain, *cells])
    for name, scores in (baselines or {}).items():
        mean = average_baseline(winner, scores)
        if any(task in scores for task in tasks):
            gain = ["" if mean is None else signed(mean - plain.best)] if plain else []
            cells = [number(100 * scores[task]) if task in scores else "" for task in tasks]
            rows.append([name, "", "" if mean is None else number(mean), *gain, *cells])
    return rows


def _draw_curve(
    axes: Axes, curve: Curve, num_layers: int, levels: Mapping[str, float | None], *, large: bool = False
) -> None:
    """Draw a curve with its best and last layer and with levels; a large one has texts at the marks."""
    level_texts = []
    for style, (name, level) in enumerate(levels.items()):
        if level is not None and math.isfinite(level):
            level_texts.append(f"{name} {number(level)}")
            drawing.draw_level(axes, level, name, style)
    drawing.draw_points(axes, list(curve.points), list(curve.points.values()))
    best, last = number(curve.best), number(curve.last)
    caption = [curve.measure, f"best {best} at {curve.best_layer}"]
    if curve.best_layer != curve.last_layer:
        drawing.draw_mark(axes, "last", curve.last_layer, curve.last, f"last: {last}" if large else "", large=large)
        caption.append(f"last {last} ({signed(-curve.gain)})")
    text = f"layer {curve.best_layer}: {best}" if large else ""
    drawing.draw_mark(axes, "best", curve.best_layer, curve.best, text, large=large)
    drawing.layer_axis(axes, num_layers)
    drawing.value_axis(axes, pad=0.16 if large else 0.08)
    drawing.set_title(axes, curve.name, [*caption, *level_texts], large=large)


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
    frame = check_frame(frame)
    names = frame.select("kind", "name", "dataset").unique(maintain_order=True).rows()
    names.sort(key=lambda row: row[0] != "score")
    figure, (head, *panels) = drawing.panel_grid(1 + len(names), head=True)
    for axes in figure.axes:
        drawing.draw_rule(axes, layer, chosen=True)
        drawing.layer_axis(axes, num_layers)
    for row, (name, choice) in enumerate(choices.items()):
        if name == rule:
            drawing.draw_mark(head, "best", choice, row, large=True)
        else:
            drawing.draw_points(head, [choice], [row], "disc")
        drawing.write(head, str(choice), (choice, row), bold=name == rule, va="center")
    drawing.row_axis(head, [name.replace("+dataset", "+\ndataset") if len(name) > 30 else name for name in choices])
    drawing.set_title(head, f"layer {layer}, by {rule}", large=True)
    for axes, (kind, name, dataset) in zip(panels, names, strict=True):
        rows = frame.filter(kind=kind, name=name, dataset=dataset).sort("layer")
        drawing.draw_points(axes, rows["layer"].to_list(), rows["value"].to_list())
        drawing.set_title(axes, f"{name}: {dataset}" if kind == "score" else name)
    return drawing.finish(figure)


def model_label(frame: pl.DataFrame, model: object, revision: object, separator: str = " ") -> str:
    """Return the model's name, and its revision if the frame holds several."""
    several = frame.filter(pl.col("model") == model)["revision"].n_unique() > 1
    return f"{model}{separator}{revision}" if several else str(model)
