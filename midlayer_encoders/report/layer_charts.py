"""Charts by layer: metrics, correlations with scores, probe accuracies and selections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import check_frame, metric_series, number_of_layers
from midlayer_encoders.report import drawing
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STATISTICS = {
    "dcor": "distance correlation",
    "signed_dcor": "distance correlation, with Spearman's sign",
    "spearman": "Spearman's ρ",
    "kendall": "Kendall's τ",
}


def plot_metrics(frame: pl.DataFrame, *, chosen: int | None = None) -> Figure:
    """Return a figure with a panel for each metric by layer and a color for each model and dataset.

    Models of different depth share an axis of relative depth.

    Args:
        frame: tidy results.
        chosen: a layer to mark.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "metric", "texts", "curvature", v) for k, v in enumerate([1.0, 2.0, 1.5])]
        >>> figure = plot_metrics(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['curvature']
    """
    frame = check_frame(frame)
    metrics = metric_series(frame)
    if not metrics:
        raise OptionError("`frame` must have rows of kind 'metric' to plot metrics, but got none.")
    labels = list(dict.fromkeys(series.label for many in metrics.values() for series in many))
    depths = {number_of_layers(part) for _, part in frame.group_by("model", "revision")} - {0}
    relative = len(depths) > 1
    figure, panels = drawing.panel_grid(len(metrics))
    for axes, (name, many) in zip(panels, metrics.items(), strict=True):
        if chosen is not None:
            drawing.draw_rule(axes, chosen, chosen=True)
        for series in many:
            x = series.depths if relative else series.layers
            tips = drawing.point_tips(series.label or name, series.layers, series.values)
            style = labels.index(series.label)
            drawing.draw_points(axes, x, series.values, label=series.label, style=style, tips=tips)
        drawing.layer_axis(axes, max(depths, default=0), relative=relative)
        drawing.set_title(axes, name, f"{name} by layer")
    return drawing.finish(figure)


def write_metrics_figure(frame: pl.DataFrame, path: str | Path) -> Path:
    """Write the figure of :func:`plot_metrics` in the format that the suffix selects, and return the path."""
    return drawing.write_figure(plot_metrics(frame), Path(path))


def gap_text(figure: Figure, reason: str = "Not finite at some layers") -> str:
    """Return a sentence, after a space, that names the panels whose curves have gaps; empty if there are none."""
    titles = [
        axes.get_title(loc="left")
        for axes in figure.axes
        if any(np.isnan(np.asarray(line.get_ydata(), dtype=float)).any() for line in axes.lines)
    ]
    return f" {reason}, and broken there: {', '.join(titles)}." if titles else ""


def plot_probes(
    tables: Mapping[str, pl.DataFrame], *, num_layers: int, chance: float | None = None, title: str = ""
) -> Figure:
    """Return a figure of probe accuracy in percent by layer, with intervals as bands and best layers as discs.

    Args:
        tables: by label, each with the columns ``layer``, ``accuracy``, ``low``, ``high`` and, if the best layer is
            selected on validation data, ``validation``.
        num_layers: number of blocks.
        chance: accuracy of guessing, drawn as a line.
        title: of the figure.

    Example:
        >>> import polars as pl
        >>> table = pl.DataFrame({"layer": [0, 1], "accuracy": [0.4, 0.6], "low": [0.3, 0.5], "high": [0.5, 0.7]})
        >>> plot_probes({"m": table}, num_layers=1, chance=0.1, title="digits").axes[0].get_title(loc="left")
        'digits'
    """
    if not tables:
        raise OptionError("`tables` must hold at least one table, but got none.")
    figure, (axes,) = drawing.panel_grid(1, size=(7.2, 3.6))
    for style, (label, table) in enumerate(tables.items()):
        x = table["layer"].to_list()
        y = (100 * table["accuracy"]).to_list()
        band = (100 * table["low"]).to_list(), (100 * table["high"]).to_list()
        drawing.draw_points(axes, x, y, label=label, style=style, band=band)
        best = table["validation" if "validation" in table.columns else "accuracy"].arg_max() or 0
        drawing.draw_points(axes, [x[best]], [y[best]], "disc", style=style)
    if chance is not None:
        text = f"guessing ({chance:.0%})"
        drawing.draw_level(axes, 100 * chance, text, text)
    drawing.layer_axis(axes, num_layers)
    axes.set_ylabel("accuracy, %")
    drawing.set_title(axes, title)
    return drawing.finish(figure)


def plot_selection(
    frame: pl.DataFrame, *, layer: int, rule: str, choices: Mapping[str, int], num_layers: int
) -> Figure:
    """Return a figure of the layer that each rule selects, above a panel for each score and metric.

    Args:
        frame: tidy results of one model; may be empty.
        layer: the selected layer.
        rule: that selected it.
        choices: the layer that each rule selects.
        num_layers: number of blocks of the model.
    """
    frame = check_frame(frame)
    names = frame.select("kind", "name", "dataset").unique(maintain_order=True).rows()
    names.sort(key=lambda row: row[0] != "score")
    figure, (head, *panels) = drawing.panel_grid(1 + len(names), head=True)
    for axes in figure.axes:
        drawing.draw_rule(axes, layer, chosen=True)
        drawing.layer_axis(axes, num_layers)
    for row, (name, choice) in enumerate(choices.items()):
        if name == rule:
            drawing.draw_mark(head, "best", choice, row, "", large=True)
        else:
            drawing.draw_points(head, [choice], [row], "disc")
        drawing.write(head, str(choice), (choice, row), bold=name == rule, va="center")
    drawing.row_axis(head, [name.replace("+dataset", "+\ndataset") if len(name) > 30 else name for name in choices])
    drawing.set_title(head, f"layer {layer}, by {rule}", large=True)
    for axes, (kind, name, dataset) in zip(panels, names, strict=True):
        rows = frame.filter(kind=kind, name=name, dataset=dataset).sort("layer")
        drawing.draw_points(axes, rows["layer"].to_list(), rows["value"].to_list())
        drawing.set_title(axes, f"{name}: {dataset}" if kind == "score" else name)
    return drawing.finish(figure)


def plot_correlations(frame: pl.DataFrame, *, statistics: Sequence[str] = ("dcor", "spearman", "kendall")) -> Figure:
    """Return a figure with a panel for each statistic, a row for each metric and a color for each model.

    Large dots are averages over tasks with their intervals, small ones single tasks (Figures 3, 8 and 9).

    Args:
        frame: returned by :func:`midlayer_encoders.comparing.correlation.correlate`.
        statistics: the panels from left to right.
    """
    if frame.is_empty():
        raise OptionError("`frame` must have correlations to plot, but got none.")
    for name in statistics:
        check_choice("statistics", name, _STATISTICS)
    metrics = frame["metric"].unique(maintain_order=True).to_list()
    models = frame.select("model", "revision").unique(maintain_order=True).rows()
    size = (1.6 / len(statistics) + 3.1, 1.0 + len(metrics) * (0.22 + 0.2 * len(models)))
    figure, panels = drawing.panel_grid(len(statistics), columns=len(statistics), size=size)
    for axes, statistic in zip(panels, statistics, strict=True):
        rows = frame.filter(statistic=statistic)
        groups = {
            model_label(frame, model, revision, ", "): rows.filter(model=model, revision=revision)
            for model, revision in models
        }
        _draw_correlations(axes, groups, metrics, 0 if statistic == "dcor" else -1)
        drawing.row_axis(axes, [metric.replace("_", " ") for metric in metrics])
        axes.set_xlabel("correlation with the score")
        drawing.set_title(axes, _STATISTICS[statistic])
    return drawing.finish(figure)


def model_label(frame: pl.DataFrame, model: object, revision: object, separator: str = " ") -> str:
    """Return the model's name, and its revision if the frame holds several."""
    several = frame.filter(pl.col("model") == model)["revision"].n_unique() > 1
    return f"{model}{separator}{revision}" if several else str(model)


def _draw_correlations(axes: Axes, groups: Mapping[str, pl.DataFrame], metrics: Sequence[str], low: float) -> None:
    """Draw small dots for tasks and large ones for averages of each group, and a text where one is undefined."""
    drawing.draw_rule(axes, 0)
    for style, (label, rows) in enumerate(groups.items()):
        offset = (style - (len(groups) - 1) / 2) * 0.7 / len(groups)
        for average in (False, True):
            part = rows.filter(pl.col("value").is_not_null(), (pl.col("task") == "average") == average)
            spans = part.select(pl.col("low", "high").fill_null(pl.col("value"))).rows()
            tips = [
                f"{metric}, {task}: {value:.3f} ({start:.3f} to {end:.3f})"
                for metric, task, value, (start, end) in zip(
                    part["metric"], part["task"], part["value"], spans, strict=True
                )
            ]
            drawing.draw_points(
                axes,
                part["value"].to_list(),
                [metrics.index(metric) + offset for metric in part["metric"]],
                "disc" if average else "dot",
                label=label if average and len(groups) > 1 else "",
                style=style,
                tips=tips,
                spans=spans if average else (),
            )
        for metric in rows.filter(pl.col("value").is_null(), pl.col("task") == "average")["metric"]:
            drawing.write(axes, "undefined", (0, metrics.index(metric) + offset), (0, 0), va="center")
    margin = 0.03 * (1 - low)
    axes.set_xlim(low - margin, 1 + margin)
