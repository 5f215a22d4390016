"""What matplotlib's figures share: inks, grids of panels, an axis of layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from midlayer_encoders.report.ticks import layer_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BEST", "INK", "MISSING", "SOFT", "columns_for", "grid", "layer_axis"]

BEST, INK, SOFT = "#b54600", "#1b1f24", "#57606a"

MISSING = "#b9bec5"
"""The ground that shows through where a heat map has no value."""


def columns_for(count: int) -> int:
    """Return how many panels stand in a row when there are ``count``."""
    return min(count, 3 if count <= 9 else 4)


def grid(count: int, *, columns: int, legend: int = 0, head: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``count`` panels, the last row short, below a wide one where ``head`` asks for it."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / columns)
    width = 7.5 if columns * 3.2 < 7.5 and head else max(columns * 3.2, 5.0)
    heights = [3.2] * head + [2.2] * rows
    extra = 0.25 * math.ceil(legend / 3) + 0.3
    figure = Figure(figsize=(width, sum(heights) + extra), layout="constrained")
    spec = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    panels = [figure.add_subplot(spec[0, :])] if head else []
    panels += [figure.add_subplot(spec[head + place // columns, place % columns]) for place in range(count)]
    return figure, panels


def layer_axis(axes: Axes, num_layers: int, *, relative: bool = False) -> None:
    """Give a panel the quiet frame that all have, and an axis of layers or of relative depth."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.grid(axis="y", color="#d5d9de", linewidth=0.6)
    axes.tick_params(labelsize=8, colors=SOFT)
    if relative:
        axes.set_xlabel("depth (layer / number of layers)", fontsize=8, color=SOFT)
        axes.set_xlim(-0.03, 1.03)
        return
    axes.set_xticks(layer_ticks(num_layers, 7))
    axes.set_xlim(-0.03 * max(num_layers, 1), 1.03 * max(num_layers, 1))
    axes.set_xlabel("layer", fontsize=8, color=SOFT)
