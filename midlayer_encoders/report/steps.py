"""A training history: metrics by layer and step, how much each layer moves, and when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.frame import spans
from midlayer_encoders.frame.steps import History, histories, layer_changes, settled, step_word, thinned
from midlayer_encoders.report.axes import Axis, layer_axis, place_axis
from midlayer_encoders.report.charts import Bars, Cells, Chart, Line, Panel, Scale, layer_tips, value_axis
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.ticks import significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "change_chart",
    "curves_chart",
    "heat_chart",
    "mean_changes",
    "plot_steps_change",
    "plot_steps_curves",
    "plot_steps_heat",
]


def plot_steps_heat(frame: pl.DataFrame) -> Figure:
    """Return a figure with a heat map for each metric: layers upward, steps to the right, equally far apart.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite leave a gray cell.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_heat(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].images[0].get_array().tolist()
        ('lidar', [[1.0, 2.0], [2.0, 3.0]])
    """
    return draw(heat_chart(histories(frame)))


def plot_steps_curves(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric by layer, a curve for each step: dark is early, bright is late.

    Colors are as far apart as the steps are in their order, so that steps that double each time look evenly spread.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite break a curve.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_curves(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [2.0, 3.0]]
    """
    return draw(curves_chart(histories(frame)))


def plot_steps_change(frame: pl.DataFrame, *, within: float = 0.1) -> Figure:
    """Return a figure with two panels for each metric: how much each layer moves, and when it stops.

    Above, the mean of :func:`layer_changes` over successive steps, in percent of the metric's range; below, the
    step of :func:`settled`.

    Args:
        frame: tidy, of one model, whose revisions name steps, two or more.
        within: the share of the metric's range that counts as settled.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> values = {1: (5.0, 1.0), 2: (5.0, 3.0)}
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "dime", v[k]) for s, v in values.items() for k in (0, 1)]
        >>> figure = plot_steps_change(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> figure.axes[0].lines[0].get_ydata().tolist()
        [0.0, 50.0]
    """
    return draw(change_chart(frame, within=within))


def heat_chart(every: Sequence[History]) -> Chart:
    """Return a map of layers and steps for each history."""
    return Chart(tuple(_heat_panel(one) for one in every))


def curves_chart(every: Sequence[History]) -> Chart:
    """Return a panel for each history with a curve for each step; ten steps at most are in the key."""
    steps = every[0].steps
    named = {place: f"step {step_word(steps[place])}" for place in thinned(len(steps), 10)}
    panels = []
    for one in every:
        lines = tuple(
            Line(one.layers, values, named.get(place, ""), place, layer_tips(f"step {step}", one.layers, values))
            for place, (step, values) in enumerate(zip(one.steps, map(tuple, one.values.tolist()), strict=True))
        )
        label = f"{one.title} by layer, a curve for each step"
        panels.append(Panel(one.title, layer_axis(one.layers[-1]), value_axis(lines), lines, label, ordered=len(steps)))
    return Chart(tuple(panels))


def change_chart(frame: pl.DataFrame, *, within: float) -> Chart:
    """Return two panels for each history: the mean change of each layer, and the step from which on it has settled."""
    ends = settled(frame, within=within)
    panels = []
    for one in histories(frame):
        mine = ends.filter(pl.col("name") == one.name, pl.col("dataset") == one.dataset)
        panels += [_change_panel(one, mean_changes(frame, one), mine), _settled_panel(one, mine, within)]
    return Chart(tuple(panels), size=(3.2, 1.9), stack=2)


def mean_changes(frame: pl.DataFrame, one: History) -> dict[int, float]:
    """Return the mean change of each layer between successive steps, in percent of the metric's range."""
    mine = frame.filter(pl.col("name") == one.name, pl.col("dataset") == one.dataset)
    mean = layer_changes(mine).group_by("layer").agg(100 * pl.col("relative").mean()).sort("layer")
    return dict(mean.iter_rows())


def _heat_panel(one: History) -> Panel:
    finite = one.values[np.isfinite(one.values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    values = tuple(map(tuple, one.values.T.tolist()))
    tips = tuple(
        tuple(
            f"{one.title}, step {step}, layer {layer}: {significant(v)}" for step, v in zip(one.steps, row, strict=True)
        )
        for layer, row in zip(one.layers, values, strict=True)
    )
    return Panel(
        one.title,
        place_axis("step", [step_word(step) for step in one.steps], 5),
        place_axis("layer", one.layers),
        (Cells(values, tips, Scale(low, high, (significant(low), significant(high)))),),
        label=f"{one.title} by layer and step",
    )


def _change_panel(one: History, changes: dict[int, float], ends: pl.DataFrame) -> Panel:
    tips = tuple(f"layer {layer}: {value:.3g} %" for layer, value in changes.items())
    line = Line(tuple(changes), tuple(changes.values()), tips=tips)
    top = 1.1 * max(changes.values(), default=0.0) or 1.0
    return Panel(
        one.title,
        layer_axis(one.layers[-1], room=0.6),  # as wide as the bars below it
        Axis("change, % of range", 0, top),
        (line,),
        label=f"{one.title}: mean change of each layer",
        caption=(_first_and_last(ends),),
    )


def _settled_panel(one: History, ends: pl.DataFrame, within: float) -> Panel:
    places = tuple(one.steps.index(step) for step in ends["step"])
    tips = tuple(f"layer {layer}: step {step}" for layer, step in ends.select("layer", "step").iter_rows())
    ticks = tuple((place, step_word(one.steps[place])) for place in thinned(len(one.steps), 4))
    return Panel(
        f"settled within {100 * within:g} % from step",
        layer_axis(one.layers[-1], room=0.6),
        Axis("step", -0.6, len(one.steps) - 0.4, ticks),
        (Bars(tuple(ends["layer"]), places, -0.6, tips),),
        label=f"{one.title}: the step from which on each layer has settled",
    )


def _first_and_last(ends: pl.DataFrame) -> str:
    if ends.is_empty():
        return "nothing was finite"
    words = []
    for word, step in (("first", min(ends["step"])), ("last", max(ends["step"]))):
        layers = tuple(ends.filter(pl.col("step") == step)["layer"].sort())
        some = "layers" if len(layers) > 1 else "layer"
        words.append(f"{word} settled: {some} {spans(layers)} at step {step_word(step)}")
    return "; ".join(words)
