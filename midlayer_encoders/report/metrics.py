"""Metrics over depth: a panel for each, models and texts told apart by color."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_frame, metric_series, number_of_layers
from midlayer_encoders.report.axes import DEPTH, layer_axis
from midlayer_encoders.report.charts import Chart, Line, Panel, Part, Rule, layer_tips, value_axis
from midlayer_encoders.report.matplotlib_figures import draw, write_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["broken_words", "metrics_chart", "plot_metrics", "write_metrics_figure"]


def plot_metrics(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric, over layers; models and texts are told apart by color.

    Models of different depth share an axis of relative depth instead of layers.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "metric", "texts", "curvature", v) for k, v in enumerate([1.0, 2.0, 1.5])]
        >>> figure = plot_metrics(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['curvature']
    """
    return draw(metrics_chart(frame))


def write_metrics_figure(frame: pl.DataFrame, path: str | Path) -> Path:
    """Write the figure of :func:`plot_metrics` and return where it lies; the ending decides the format."""
    return write_figure(plot_metrics(frame), Path(path))


def metrics_chart(frame: pl.DataFrame, *, chosen: int | None = None) -> Chart:
    """Return a panel for each metric, a line for each model and set of texts; ``chosen`` is a layer to point out."""
    frame = check_frame(frame)
    metrics = metric_series(frame)
    if not metrics:
        raise OptionError("`frame` must have rows of kind 'metric' to plot metrics, but got none.")
    labels = list(dict.fromkeys(series.label for many in metrics.values() for series in many))
    depths = {number_of_layers(part) for _, part in frame.group_by("model", "revision")} - {0}
    relative = len(depths) > 1
    panels = []
    for name, many in metrics.items():
        lines = [
            Line(
                series.depths if relative else series.layers,
                series.values,
                series.label,
                labels.index(series.label),
                layer_tips(series.label or name, series.layers, series.values),
            )
            for series in many
        ]
        parts: tuple[Part, ...] = (*([Rule(chosen, "chosen")] if chosen is not None else []), *lines)
        across = DEPTH if relative else layer_axis(max(depths, default=0))
        panels.append(Panel(name, across, value_axis(lines), parts, f"{name} by layer"))
    return Chart(tuple(panels))


def broken_words(chart: Chart, why: str = "Not finite at some layers") -> str:
    """Return which panels have curves with gaps, in a sentence that follows others; nothing where none has."""
    broken = [
        panel.title for panel in chart.panels if not all(math.isfinite(y) for line in panel.lines for y in line.y)
    ]
    return f" {why}, and broken there: {', '.join(broken)}." if broken else ""
