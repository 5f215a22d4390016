"""Figures of a training history: metrics by layer and step, and which layers settle first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.frame.steps import History, histories, layer_changes, settled, step_of, step_word, thinned
from midlayer_encoders.report.axes import MISSING, SOFT, columns_for, grid, layer_axis
from midlayer_encoders.report.style import SERIES
from midlayer_encoders.report.ticks import layer_ticks, padded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

__all__ = [
    "layer_changes",
    "plot_steps_change",
    "plot_steps_curves",
    "plot_steps_heat",
    "settled",
    "step_colours",
    "step_of",
]


def plot_steps_heat(frame: pl.DataFrame) -> Figure:
    """Return a figure with a heat map for each metric: layers upward, steps to the right, equally far apart.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite leave a grey cell.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_heat(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].images[0].get_array().tolist()
        ('lidar', [[1.0, 2.0], [2.0, 3.0]])
    """
    every = histories(frame)
    figure, panels = grid(len(every), columns=columns_for(len(every)))
    for axes, one in zip(panels, every, strict=True):
        axes.set_facecolor(MISSING)
        image = axes.imshow(np.ma.masked_invalid(one.values.T), cmap="Blues", aspect="auto", origin="lower")
        axes.set_title(one.title, loc="left", fontsize=10)
        _step_ticks(axes, one.steps)
        rows = [place for place, layer in enumerate(one.layers) if layer in layer_ticks(one.layers[-1], 7)]
        axes.set_yticks(rows, [str(one.layers[place]) for place in rows])
        axes.set_ylabel("layer", fontsize=8, color=SOFT)
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=8, colors=SOFT)
        figure.colorbar(image, ax=axes, pad=0.02).ax.tick_params(labelsize=7, colors=SOFT)
    return figure


def plot_steps_curves(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric by layer, a curve for each step: dark is early, bright is late.

    Colours are as far apart as the steps are in their order, so that steps that double each time look evenly spread.

    Args:
        frame: tidy, of one model, whose revisions name steps. Values that are not finite break a curve.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", f"step{s}", k, k / 1, "metric", "t", "lidar", s + k) for s in (1, 2) for k in (0, 1)]
        >>> figure = plot_steps_curves(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [2.0, 3.0]]
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    every = histories(frame)
    steps = every[0].steps
    colours = step_colours(len(steps))
    figure, panels = grid(len(every), columns=columns_for(len(every)))
    for axes, one in zip(panels, every, strict=True):
        for place, values in enumerate(one.values):
            axes.plot(one.layers, values, color=colours(place), linewidth=1.5, marker="o", markersize=2)
        axes.set_ylim(padded(one.values[np.isfinite(one.values)].tolist() or [0.0]))
        axes.set_title(one.title, loc="left", fontsize=10)
        layer_axis(axes, one.layers[-1])
    norm = BoundaryNorm(np.arange(len(steps) + 1) - 0.5, len(steps))
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=panels, pad=0.02, aspect=30)
    shown = thinned(len(steps), 12)
    bar.set_ticks(shown, labels=[step_word(steps[place]) for place in shown])
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=8, colors=SOFT, length=0)
    bar.outline.set_visible(False)
    bar.set_label("step", fontsize=8, color=SOFT)
    return figure


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
    from matplotlib.figure import Figure

    every = histories(frame)
    changes, ends = layer_changes(frame), settled(frame, within=within)
    columns = columns_for(len(every))
    rows = -(-len(every) // columns)
    figure = Figure(figsize=(max(columns * 3.2, 5.0), rows * 3.4 + 0.3), layout="constrained")
    cells = figure.add_gridspec(rows, columns)
    for place, one in enumerate(every):
        cell = cells[place // columns, place % columns].subgridspec(2, 1, height_ratios=[3, 2])
        _draw_changes(figure.add_subplot(cell[0]), one, changes)
        _draw_settled(figure.add_subplot(cell[1]), one, ends, within=within)
    return figure


def step_colours(count: int, *, dark: bool = False) -> ListedColormap:
    """Return a colour for each of ``count`` steps in order; all of them show on white, or on a ``dark`` ground.

    Example:
        >>> step_colours(3).N
        3
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(*((0.3, 1.0) if dark else (0.0, 0.92)), max(count, 1))))


def _step_ticks(axes: Axes, steps: Sequence[int]) -> None:
    shown = thinned(len(steps), 6)
    axes.set_xticks(shown, [step_word(steps[place]) for place in shown])
    axes.set_xlabel("step", fontsize=8, color=SOFT)


def _draw_changes(axes: Axes, one: History, changes: pl.DataFrame) -> None:
    mine = changes.filter((pl.col("name") == one.name) & (pl.col("dataset") == one.dataset))
    mean = mine.group_by("layer").agg(percent=100 * pl.col("relative").mean()).sort("layer")
    axes.plot(mean["layer"], mean["percent"], color=SERIES[0], linewidth=1.6, marker="o", markersize=2.5)
    axes.set_ylim(0, max(mean["percent"].to_list() or [0.0]) * 1.1 or 1.0)
    axes.set_title(one.title, loc="left", fontsize=10)
    layer_axis(axes, one.layers[-1])
    axes.set_xlim(-0.6, one.layers[-1] + 0.6)
    axes.set_xlabel("")
    axes.set_ylabel("change, % of range", fontsize=8, color=SOFT)
    axes.tick_params(labelbottom=False)


def _draw_settled(axes: Axes, one: History, ends: pl.DataFrame, *, within: float) -> None:
    mine = ends.filter((pl.col("name") == one.name) & (pl.col("dataset") == one.dataset))
    places = [one.steps.index(step) for step in mine["step"]]
    axes.bar(mine["layer"].to_list(), [place + 0.6 for place in places], bottom=-0.6, color="#a8c8e4", width=0.8)
    layer_axis(axes, one.layers[-1])
    shown = thinned(len(one.steps), 4)
    axes.set_yticks(shown, [step_word(one.steps[place]) for place in shown])
    axes.set_ylim(-0.6, len(one.steps) - 0.4)
    axes.set_xlim(-0.6, one.layers[-1] + 0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel("step", fontsize=8, color=SOFT)
    axes.set_title(f"settled within {100 * within:g} % from step", loc="left", fontsize=8, color=SOFT)
