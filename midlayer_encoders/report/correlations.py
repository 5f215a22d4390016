"""Correlations between metrics and scores, as the paper's Figures 3, 8 and 9: a row for each metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError, check_choice
from midlayer_encoders.report.axes import Axis, named_axis
from midlayer_encoders.report.charts import Chart, Dots, Panel, Part, Rule, Word
from midlayer_encoders.report.matplotlib_figures import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["correlation_panels", "correlations_chart", "plot_correlations"]

_TITLES = {
    "dcor": "distance correlation",
    "signed_dcor": "distance correlation, with Spearman's sign",
    "spearman": "Spearman's ρ",
    "kendall": "Kendall's τ",
}


def plot_correlations(frame: pl.DataFrame, *, statistics: Sequence[str] = ("dcor", "spearman", "kendall")) -> Figure:
    """Return a figure with a panel for each statistic: a row per metric, models by color, intervals as bars.

    The large dot is the average over tasks with its interval, the small ones behind it are single tasks. Where a
    correlation is undefined its row says so.

    Args:
        frame: what :func:`midlayer_encoders.analysis.correlation.correlate` returns.
        statistics: which panels, from left to right.
    """
    return draw(correlations_chart(frame, statistics))


def correlations_chart(frame: pl.DataFrame, statistics: Sequence[str]) -> Chart:
    """Return the panels of :func:`plot_correlations`."""
    if frame.is_empty():
        raise OptionError("`frame` must have correlations to plot, but got none.")
    for name in statistics:
        check_choice("statistics", name, _TITLES)
    metrics = frame["metric"].unique(maintain_order=True).to_list()
    models = frame.select("model", "revision").unique(maintain_order=True).rows()
    panels = []
    for statistic in statistics:
        parts: list[Part] = [Rule(0)]
        for place, (model, revision) in enumerate(models):
            rows = frame.filter(statistic=statistic, model=model, revision=revision)
            label = _label(model, revision, models) if len(models) > 1 else ""
            parts += _model_parts(rows, metrics, place, len(models), label)
        across = Axis("", 0 if statistic == "dcor" else -1, 1)
        panels.append(Panel(_TITLES[statistic], across, named_axis(metrics), tuple(parts)))
    height = 1.0 + len(metrics) * (0.22 + 0.2 * len(models))
    return Chart(tuple(panels), columns=len(panels), size=(1.6 / len(panels) + 3.1, height))


def correlation_panels(
    frame: pl.DataFrame, *, statistics: Sequence[str] = ("spearman", "kendall", "dcor")
) -> list[Panel]:
    """Return how each metric goes with the mean score, a panel for each model (Figures 3, 8 and 9).

    Args:
        frame: of :func:`~midlayer_encoders.analysis.correlation.correlate`.
        statistics: which to draw.
    """
    rows = frame.filter(
        pl.col("task") == "average", pl.col("statistic").is_in(statistics), pl.col("value").is_not_null()
    )
    if rows.is_empty():
        notes = ", ".join(frame["note"].unique().drop_nulls().to_list())
        raise OptionError(f"`frame` must hold a correlation to draw, but none is defined: {notes}.")
    names = rows["metric"].unique(maintain_order=True).to_list()
    panels = []
    for (model,), mine in rows.group_by("model", maintain_order=True):
        parts: list[Part] = [Rule(0)]
        for place, statistic in enumerate(statistics):
            offset = 0.22 * (place - (len(statistics) - 1) / 2)
            parts.append(_averages(mine.filter(pl.col("statistic") == statistic), names, offset, place, statistic))
        across = Axis("correlation with the mean score", -1, 1)
        panels.append(Panel(str(model), across, named_axis([name.replace("_", " ") for name in names]), tuple(parts)))
    return panels


def _model_parts(rows: pl.DataFrame, metrics: Sequence[str], place: int, count: int, label: str) -> list[Part]:
    """Return single tasks behind, the averages before them, and a word where an average is undefined."""
    offset = (place - (count - 1) / 2) * 0.7 / count
    known, average = pl.col("value").is_not_null(), pl.col("task") == "average"
    single = rows.filter(known, ~average)
    tips = tuple(f"{task}: {value:.3f}" for task, value in single.select("task", "value").iter_rows())
    y = tuple(metrics.index(metric) + offset for metric in single["metric"])
    undefined = rows.filter(~known, average)["metric"]
    return [
        Dots(tuple(single["value"]), y, "dot", style=place, tips=tips),
        _averages(rows.filter(known, average), metrics, offset, place, label),
        *(Word(0, metrics.index(metric) + offset, "undefined", centered=True) for metric in undefined),
    ]


def _averages(rows: pl.DataFrame, metrics: Sequence[str], offset: float, place: int, label: str) -> Dots:
    ends = rows.select(pl.col("low", "high").fill_null(pl.col("value"))).rows()
    tips = tuple(
        f"{label or metric}, {metric}: {value:.3f} ({low:.3f} to {high:.3f})"
        for metric, value, (low, high) in zip(rows["metric"], rows["value"], ends, strict=True)
    )
    y = tuple(metrics.index(metric) + offset for metric in rows["metric"])
    return Dots(tuple(rows["value"]), y, "disc", label, place, tips, tuple(ends))


def _label(model: str, revision: str, models: Sequence[tuple[str, ...]]) -> str:
    several = len({one for name, one in models if name == model}) > 1
    return f"{model}, {revision}" if several else model
