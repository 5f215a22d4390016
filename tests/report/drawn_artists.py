"""Read artists of a matplotlib figure back as data."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D


def artists(axes: Axes, kind: str) -> list[Line2D]:
    """Return the lines of an axes of a kind: line, dots, mark, level, rule or front."""
    return [line for line in axes.lines if line.get_gid() == kind]


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes if axes.get_label() != "<colorbar>"]
