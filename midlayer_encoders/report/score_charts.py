"""Charts of scores by layer: the average, each task, and each recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import Baselines, Curve, Summary, average_baseline, summary
from midlayer_encoders.report import charts
from midlayer_encoders.report.drawing import draw
from midlayer_encoders.report.labels import number, signed

if TYPE_CHECKING:
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
    scores = _score_summary(frame, "scores")
    tasks = tasks_chart(scores).panels if len(scores.tasks) > 1 else ()
    return draw(charts.Chart((average_panel(scores), *tasks), head=True, y_label="points (score × 100)"))


def plot_heatmap(frame: pl.DataFrame) -> Figure:
    """Return a heat map of layers by tasks: how many points each layer is below the task's best layer.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_heatmap(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [[float(round(value, 1)) for value in row] for row in figure.axes[0].collections[0].get_array()]
        [[20.0, 0.0, 10.0]]
    """
    panel = losses_panel(_score_summary(frame, "layers by tasks"))
    size = (max(6.0, 3.0 + 0.24 * (panel.x.high + 0.5)), 1.3 + 0.26 * len(panel.y.ticks))
    return draw(charts.Chart((panel,), size=size))


def plot_recipes(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> Figure:
    """Return a figure of each recipe's average by layer, and a heat map of the points below the best layer of all."""
    return draw(charts.Chart((recipes_panel(recipes, baselines), recipes_map(recipes)), columns=1, size=(7.0, 2.6)))


def average_panel(
    scores: Summary, baselines: Baselines | None = None, costs: Mapping[int, str] | None = None
) -> charts.Panel:
    """Return the average by layer, or only a title if no layer was scored on every task.

    Args:
        scores: of one model.
        baselines: drawn as levels.
        costs: text about the costs of each layer, for its tooltip.
    """
    average = scores.average
    if average is None:
        return charts.Panel(
            "no layer was scored on every task: no average", charts.layer_axis(0), charts.Axis("", 0, 1), ()
        )
    task = scores.tasks[0] if len(scores.tasks) == 1 else None
    subject = f"{task.name} ({task.measure})" if task else f"average of {len(scores.tasks)} tasks"
    return _curve_panel(
        average,
        scores.num_layers,
        average_levels(scores, baselines or {}),
        name=task.name if task else "average",
        title=f"{subject}: {_curve_text(average)}",
        pad=0.16,
        costs=costs,
    )


def average_levels(scores: Summary, baselines: Baselines) -> list[charts.Level]:
    """Return the average of each baseline that was scored on every task."""
    return _levels({name: average_baseline(scores, by_task) for name, by_task in baselines.items()})


def tasks_chart(
    scores: Summary, baselines: Baselines | None = None, costs: Mapping[int, str] | None = None
) -> charts.Chart:
    """Return a panel for each task, each on a separate scale; the arguments are those of :func:`average_panel`."""
    panels = []
    for task in scores.tasks:
        points = {name: by_task.get(task.name) for name, by_task in (baselines or {}).items()}
        levels = _levels({name: None if score is None else 100 * score for name, score in points.items()})
        panels.append(_curve_panel(task, scores.num_layers, levels, name=task.name, title=task.name, costs=costs))
    return charts.Chart(tuple(panels))


def losses_panel(scores: Summary) -> charts.Panel:
    """Return how many points each layer is below the task's best layer, with rows for the average and each task."""
    curves = [scores.average, *scores.tasks] if scores.average and len(scores.tasks) > 1 else list(scores.tasks)
    labels = [f"{curve.name}: best at layer {curve.best_layer}, {number(curve.best)} points" for curve in curves]
    return _losses_map(
        {curve.name: curve for curve in curves},
        {curve.name: curve.best for curve in curves},
        title="points below each task's best layer (ringed)",
        best_text="0 below its best",
        labels=labels,
        own_best=True,
        apart=len(curves) > len(scores.tasks),
    )


def recipes_panel(recipes: Mapping[str, Summary], baselines: Baselines | None = None) -> charts.Panel:
    """Return a curve for each recipe, with the best layer of the best recipe marked, and a level for each baseline."""
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    lines = [
        charts.Line(
            tuple(curve.points),
            tuple(curve.points.values()),
            name,
            style,
            charts.layer_tips(name, tuple(curve.points), tuple(curve.points.values()), number),
        )
        for style, (name, curve) in enumerate(averages.items())
    ]
    best = averages[winner]
    mark = charts.Mark("best", best.best_layer, best.best, f"{winner}, layer {best.best_layer}: {number(best.best)}")
    tasks = recipes[winner].tasks
    title = tasks[0].name if len(tasks) == 1 else f"average of {len(tasks)} tasks"
    levels = [replace(level, label=level.text) for level in average_levels(recipes[winner], baselines or {})]
    texts = [f"{name}: best {number(curve.best)} at layer {curve.best_layer}" for name, curve in averages.items()]
    label = "; ".join([*texts, *(level.text for level in levels)])
    parts: tuple[charts.Part, ...] = (*lines, *levels, mark)
    num_layers = max(scores.num_layers for scores in recipes.values())
    return charts.Panel(
        f"{title}, points", charts.layer_axis(num_layers), charts.value_axis(parts, pad=0.12), parts, label
    )


def recipes_map(recipes: Mapping[str, Summary]) -> charts.Panel:
    """Return how many points each layer of each recipe is below the best layer of all recipes."""
    averages = _averages(recipes)
    best = averages[best_recipe(recipes)].best
    labels = [f"{name}: best at layer {curve.best_layer}, {number(curve.best)}" for name, curve in averages.items()]
    return _losses_map(
        averages,
        dict.fromkeys(averages, best),
        title="points below the best recipe and layer (each recipe's best layer is ringed)",
        best_text="the best of all",
        labels=labels,
    )


def best_recipe(recipes: Mapping[str, Summary]) -> str:
    """Return the recipe whose best layer has the highest average; ties go to the first."""
    averages = _averages(recipes)
    return max(averages, key=lambda name: averages[name].best)


def recipe_tile(recipes: Mapping[str, Summary]) -> tuple[str, str, str]:
    """Return heading, value and note of the tile about the best recipe."""
    averages = _averages(recipes)
    winner = best_recipe(recipes)
    plain = averages.get(_PLAIN)
    if plain is None or winner == _PLAIN:
        return "Best recipe", winner, f"of {len(averages)}"
    return "Best recipe", winner, f"{signed(averages[winner].best - plain.best)} points over plain at its best layer"


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


def _losses_map(
    curves: Mapping[str, Curve],
    references: Mapping[str, float],
    *,
    title: str,
    best_text: str,
    labels: Sequence[str],
    own_best: bool = False,
    apart: bool = False,
) -> charts.Panel:
    """Return a heat map of the distance of each layer of each curve from a reference value."""
    layers = sorted(set().union(*(curve.points for curve in curves.values())))
    losses = [
        [references[name] - curve.points.get(layer, math.nan) for layer in layers] for name, curve in curves.items()
    ]
    # The scale ends at the 90th percentile, so that one bad layer does not hide the others.
    widest = max(float(np.nanquantile(losses[apart:], 0.9)), 1.0)
    tips = []
    for name, curve in curves.items():
        scores = {layer: number(value) for layer, value in curve.points.items()}
        if own_best:
            scores = {
                layer: f"{scores[layer]}, {number(curve.best - curve.points[layer])} below its best" for layer in scores
            }
        tips.append(tuple(f"{name}, layer {layer}: {scores.get(layer, 'not scored')}" for layer in layers))
    cells = charts.Cells(
        tuple(map(tuple, losses)),
        tuple(tips),
        charts.Scale(0, widest, (best_text, f"{number(widest)} points or more below"), falling=True, capped=True),
        peaks=tuple(layers.index(curve.best_layer) for curve in curves.values()),
        labels=tuple(labels),
        apart=apart,
    )
    return charts.Panel(title, charts.place_axis("layer", layers, 9), charts.named_axis(list(curves)), (cells,))


def _score_summary(frame: pl.DataFrame, subject: str) -> Summary:
    scores = summary(frame)
    if not scores.tasks:
        raise OptionError(f"`frame` must have rows of kind 'score' to plot {subject}, but got none.")
    return scores


def _levels(points: Mapping[str, float | None]) -> list[charts.Level]:
    return [
        charts.Level(value, f"{name} {number(value)}", label=name, style=style)
        for style, (name, value) in enumerate(points.items())
        if value is not None
    ]


def _curve_panel(
    curve: Curve,
    num_layers: int,
    levels: Sequence[charts.Level],
    *,
    name: str,
    title: str,
    pad: float = 0.08,
    costs: Mapping[int, str] | None = None,
) -> charts.Panel:
    layers, values = tuple(curve.points), tuple(curve.points.values())
    line = charts.Line(layers, values, tips=charts.layer_tips(name, layers, values, number, costs))
    best = charts.Mark("best", curve.best_layer, curve.best, f"layer {curve.best_layer}: {number(curve.best)}")
    last = charts.Mark("last", curve.last_layer, curve.last, f"last: {number(curve.last)}")
    marks = (best,) if curve.best_layer == curve.last_layer else (last, best)
    parts = (*levels, line, *marks)
    label = (
        f"{name} by layer: best {number(curve.best)} at layer {curve.best_layer}, "
        f"{number(curve.last)} at the last, layer {curve.last_layer}" + "".join(f"; {level.text}" for level in levels)
    )
    caption: list[str] = []
    if title == name:
        caption = [curve.measure, f"best {number(curve.best)} at {curve.best_layer}"]
        if len(marks) > 1:
            caption.append(f"last {number(curve.last)} ({signed(-curve.gain)})")
        caption += [level.text for level in levels]
    axis = charts.value_axis(parts, pad=pad)
    return charts.Panel(
        title, charts.layer_axis(num_layers), axis, parts, label, tuple(caption), gain=signed(curve.gain)
    )


def _curve_text(curve: Curve) -> str:
    if len(curve.points) == 1:
        return f"{number(curve.best)} at layer {curve.best_layer}"
    if curve.best_layer == curve.last_layer:
        return f"the last layer is best, {number(curve.best)}"
    return f"best {number(curve.best)} at layer {curve.best_layer}, {signed(curve.gain)} points over the last"


def _averages(recipes: Mapping[str, Summary]) -> dict[str, Curve]:
    averages = {name: scores.average for name, scores in recipes.items() if scores.average is not None}
    if not averages:
        raise OptionError("No layer of any recipe was scored on every task, so none is the best.")
    return averages
