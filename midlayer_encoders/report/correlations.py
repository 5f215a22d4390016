"""Correlations between metrics and scores, as the paper's Figures 3, 8 and 9: a row for each metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.axes import Axis, named_axis
from midlayer_encoders.report.charts import Chart, Dots, Panel, Part, Rule, Word
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.validation import check_choice

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
        frame: what :func:`midlayer_encoders.comparing.correlation.correlate` returns.
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
        mine = frame.filter(statistic=statistic)
        groups = {
            _label(model, revision, models): mine.filter(model=model, revision=revision) for model, revision in models
        }
        across = Axis("", 0 if statistic == "dcor" else -1, 1)
        panels.append(Panel(_TITLES[statistic], across, named_axis(metrics), _parts(groups, metrics)))
    height = 1.0 + len(metrics) * (0.22 + 0.2 * len(models))
    return Chart(tuple(panels), columns=len(panels), size=(1.6 / len(panels) + 3.1, height))


def correlation_panels(
    frame: pl.DataFrame, *, statistics: Sequence[str] = ("spearman", "kendall", "dcor")
) -> list[Panel]:
    """Return how each metric goes with the mean score, a panel for each model (Figures 3, 8 and 9).

    Args:
        frame: of :func:`~midlayer_encoders.comparing.correlation.correlate`.
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
        groups = {statistic: mine.filter(statistic=statistic) for statistic in statistics}
        across = Axis("correlation with the mean score", -1, 1)
        up = named_axis([name.replace("_", " ") for name in names])
        panels.append(Panel(str(model), across, up, _parts(groups, names)))
    return panels


def _parts(groups: Mapping[str, pl.DataFrame], metrics: Sequence[str]) -> tuple[Part, ...]:
    """Return for each group single tasks behind, averages before them, and a word where an average is undefined."""
    parts: list[Part] = [Rule(0)]
    for place, (label, rows) in enumerate(groups.items()):
        offset = (place - (len(groups) - 1) / 2) * 0.7 / len(groups)
        known, average = pl.col("value").is_not_null(), pl.col("task") == "average"
        undefined = rows.filter(~known, average)["metric"]
        parts += [
            _dots(rows.filter(known, ~average), metrics, offset, "dot", "", place),
            _dots(rows.filter(known, average), metrics, offset, "disc", label if len(groups) > 1 else "", place),
            *(Word(0, metrics.index(metric) + offset, "undefined", centered=True) for metric in undefined),
        ]
    return tuple(parts)


def _dots(
    rows: pl.DataFrame, metrics: Sequence[str], offset: float, kind: Literal["disc", "dot"], label: str, place: int
) -> Dots:
    """Return a dot for each row, with the interval of those that are large."""
    ends = tuple(rows.select(pl.col("low", "high").fill_null(pl.col("value"))).rows())
    tips = tuple(
        f"{metric}, {task}: {value:.3f} ({low:.3f} to {high:.3f})"
        for metric, task, value, (low, high) in zip(rows["metric"], rows["task"], rows["value"], ends, strict=True)
    )
    y = tuple(metrics.index(metric) + offset for metric in rows["metric"])
    return Dots(tuple(rows["value"]), y, kind, label, place, tips, ends if kind == "disc" else ())


def _label(model: str, revision: str, models: Sequence[tuple[str, ...]]) -> str:
    several = len({one for name, one in models if name == model}) > 1
    return f"{model}, {revision}" if several else model
