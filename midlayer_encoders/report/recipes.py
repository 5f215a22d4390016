"""Recipes beside each other: the average of each by layer, as curves and as a map, and what the best one gains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import Baselines, Curve, Summary, average_baseline
from midlayer_encoders.report.axes import layer_axis, named_axis, place_axis
from midlayer_encoders.report.charts import Cells, Chart, Line, Mark, Panel, Part, Scale, layer_tips, value_axis
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.scores import average_levels
from midlayer_encoders.report.ticks import number, signed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["best_recipe", "plot_recipes", "recipe_rows", "recipe_tile", "recipe_words", "recipes_map", "recipes_panel"]

_PLAIN = "plain"


def best_recipe(found: Mapping[str, Summary]) -> str:
    """Return the recipe whose best layer has the highest average; of equal ones the first."""
    averages = _averages(found)
    return max(averages, key=lambda name: averages[name].best)


def plot_recipes(found: Mapping[str, Summary], baselines: Baselines | None = None) -> Figure:
    """Return a figure of the average of each recipe by layer, and a map of how far each is below the best of all."""
    return draw(Chart((recipes_panel(found, baselines), recipes_map(found)), columns=1, size=(7.0, 2.6)))


def recipes_panel(found: Mapping[str, Summary], baselines: Baselines | None = None) -> Panel:
    """Return a curve for each recipe, the best layer of the best one marked, and a level for each baseline."""
    averages, winner = _averages(found), best_recipe(found)
    lines = [
        Line(
            tuple(one.points), tuple(one.points.values()), name, place,
            layer_tips(name, tuple(one.points), tuple(one.points.values()), number),
        )
        for place, (name, one) in enumerate(averages.items())
    ]  # fmt: skip
    best = averages[winner]
    mark = Mark("best", best.best_layer, best.best, f"{winner}, layer {best.best_layer}: {number(best.best)}")
    count = len(found[winner].tasks)
    title = f"{found[winner].tasks[0].name}" if count == 1 else f"average of {count} tasks"
    label = "; ".join(f"{name}: best {number(one.best)} at layer {one.best_layer}" for name, one in averages.items())
    levels = [replace(level, label=level.text) for level in average_levels(found[winner], baselines or {})]
    label += "".join(f"; {level.text}" for level in levels)
    parts: tuple[Part, ...] = (*lines, *levels, mark)
    layers = max(one.num_layers for one in found.values())
    return Panel(f"{title}, points", layer_axis(layers), value_axis(parts, pad=0.12), parts, label)


def recipes_map(found: Mapping[str, Summary]) -> Panel:
    """Return how many points each layer of each recipe is below the best of all."""
    averages = _averages(found)
    best = averages[best_recipe(found)].best
    layers = sorted(set().union(*(one.points for one in averages.values())))
    losses = [[best - one.points.get(layer, math.nan) for layer in layers] for one in averages.values()]
    widest = max(float(np.nanquantile(losses, 0.9)), 1.0)
    tips = tuple(
        tuple(
            f"{name}, layer {layer}: " + ("not scored" if layer not in one.points else number(one.points[layer]))
            for layer in layers
        )
        for name, one in averages.items()
    )
    cells = Cells(
        tuple(map(tuple, losses)),
        tips,
        Scale(0, widest, ("the best of all", f"{number(widest)} points or more below"), falling=True, capped=True),
        peaks=tuple(layers.index(one.best_layer) for one in averages.values()),
        labels=tuple(f"{name}: best at layer {one.best_layer}, {number(one.best)}" for name, one in averages.items()),
    )
    return Panel(
        "points below the best recipe and layer (each recipe's best layer is ringed)", place_axis("layer", layers, 9),
        named_axis(list(averages)), (cells,),
    )  # fmt: skip


def recipe_tile(found: Mapping[str, Summary]) -> tuple[str, str, str]:
    """Return a name, a large word and a line below it: which recipe is best, and by how much."""
    averages, winner = _averages(found), best_recipe(found)
    plain, best = averages.get(_PLAIN), averages[winner].best
    if plain is None or winner == _PLAIN:
        return "Best recipe", winner, f"of {len(averages)}"
    return "Best recipe", winner, f"{signed(best - plain.best)} points over plain at its best layer"


def recipe_words(found: Mapping[str, Summary]) -> str:
    """Return what the best recipe gains, in a sentence or two."""
    averages, winner = _averages(found), best_recipe(found)
    best = averages[winner]
    words = f"{winner} at layer {best.best_layer} of {found[winner].num_layers} scores {number(best.best)}"
    plain = averages.get(_PLAIN)
    if plain is None:
        return f"{words}, {number(best.gain)} points more than at its last layer."
    if winner == _PLAIN:
        return f"{words}: no recipe is better than the plain text here."
    return (
        f"{words}: {number(best.best - plain.best)} points more than the best layer of the plain text "
        f"({plain.best_layer}, {number(plain.best)}), {number(best.best - plain.last)} more than its last."
    )


def recipe_rows(found: Mapping[str, Summary], baselines: Baselines | None = None) -> list[list[str]]:
    """Return a table: each recipe with its best layer, the average and every task there, beside the plain text's."""
    averages = _averages(found)
    tasks = [task.name for task in found[best_recipe(found)].tasks]
    plain = averages.get(_PLAIN)
    rows = [["recipe", "best layer", "average", *(["gain over plain"] if plain else []), *tasks]]
    for name, one in averages.items():
        curves = {task.name: task for task in found[name].tasks}
        gain = [signed(one.best - plain.best)] if plain else []
        cells = [number(curves[task].points.get(one.best_layer)) if task in curves else "" for task in tasks]
        rows.append([name, str(one.best_layer), number(one.best), *gain, *cells])
    for name, known in (baselines or {}).items():
        mean = average_baseline(found[best_recipe(found)], known)
        if any(task in known for task in tasks):
            gain = ["" if mean is None else signed(mean - plain.best)] if plain else []
            cells = [number(100 * known[task]) if task in known else "" for task in tasks]
            rows.append([name, "", "" if mean is None else number(mean), *gain, *cells])
    return rows


def _averages(found: Mapping[str, Summary]) -> dict[str, Curve]:
    averages = {name: one.average for name, one in found.items() if one.average is not None}
    if not averages:
        raise OptionError("No layer of any recipe was scored on every task, so none is the best.")
    return averages
