"""The figure of correlations between metrics and scores, as the paper's Figures 3, 8 and 9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError, check_choice
from midlayer_encoders.report.axes import SOFT
from midlayer_encoders.report.style import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_correlations"]

_TITLES = {
    "dcor": "distance correlation",
    "signed_dcor": "distance correlation, with Spearman's sign",
    "spearman": "Spearman's ρ",
    "kendall": "Kendall's τ",
}


def plot_correlations(frame: pl.DataFrame, *, statistics: Sequence[str] = ("dcor", "spearman", "kendall")) -> Figure:
    """Return a figure with a panel for each statistic: a row per metric, models by colour, intervals as bars.

    The large dot is the average over tasks with its interval, the small ones behind it are single tasks. Where a
    correlation is undefined its row says so.

    Args:
        frame: what :func:`midlayer_encoders.analysis.correlation.correlate` returns.
        statistics: which panels, from left to right.
    """
    from matplotlib.figure import Figure

    if frame.is_empty():
        raise OptionError("`frame` must have correlations to plot, but got none.")
    for name in statistics:
        check_choice("statistics", name, _TITLES)
    metrics = frame["metric"].unique(maintain_order=True).to_list()
    models = frame.select("model", "revision").unique(maintain_order=True).rows()
    height = 1.3 + len(metrics) * (0.22 + 0.2 * len(models)) + 0.2 * (len(models) > 1)
    figure = Figure(figsize=(1.6 + 3.1 * len(statistics), height), layout="constrained")
    panels = figure.subplots(1, len(statistics), sharey=True, squeeze=False)[0]
    for axes, statistic in zip(panels, statistics, strict=True):
        for number, (model, revision) in enumerate(models):
            part = frame.filter(statistic=statistic, model=model, revision=revision)
            _draw_model(axes, part, metrics, number, len(models), label=_label(model, revision, models))
        _finish(axes, metrics, statistic)
    if len(models) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(models)), frameon=False, fontsize=9)
    return figure


def _draw_model(axes: Axes, part: pl.DataFrame, metrics: Sequence[str], number: int, count: int, *, label: str) -> None:
    colour = SERIES[number % len(SERIES)]
    offset = (number - (count - 1) / 2) * 0.7 / count
    for task, metric, value, low, high in part.select("task", "metric", "value", "low", "high").iter_rows():
        row = metrics.index(metric) + offset
        if value is None:
            if task == "average":
                axes.text(0, row, "undefined", fontsize=7, color=colour, va="center", ha="center")
        elif task != "average":
            axes.plot(value, row, ".", color=colour, markersize=3, alpha=0.35, zorder=1)
        else:
            if low is not None:
                axes.plot([low, high], [row, row], color=colour, linewidth=1.4, zorder=2)
            axes.plot(value, row, "o", color=colour, markersize=5, zorder=3)
    axes.plot([], [], "o-", color=colour, markersize=5, label=label)


def _finish(axes: Axes, metrics: Sequence[str], statistic: str) -> None:
    axes.set_title(_TITLES[statistic], loc="left", fontsize=10)
    axes.set_xlim((-0.03, 1.03) if statistic == "dcor" else (-1.06, 1.06))
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_yticks(range(len(metrics)), list(metrics), fontsize=9)
    axes.set_ylim(len(metrics) - 0.5, -0.5)
    axes.grid(axis="x", color="#d5d9de", linewidth=0.6)
    axes.tick_params(labelsize=8, colors=SOFT)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _label(model: str, revision: str, models: Sequence[tuple[str, str]]) -> str:
    several = len({one for name, one in models if name == model}) > 1
    return f"{model}, {revision}" if several else model
