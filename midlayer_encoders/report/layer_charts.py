"""Charts by layer: metrics, correlations with scores, probe accuracies and selections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import check_frame, metric_series, number_of_layers
from midlayer_encoders.report import charts
from midlayer_encoders.report.drawing import draw, write_figure
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STATISTICS = {
    "dcor": "distance correlation",
    "signed_dcor": "distance correlation, with Spearman's sign",
    "spearman": "Spearman's ρ",
    "kendall": "Kendall's τ",
}


def plot_metrics(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric by layer and a color for each model and dataset.

    Models of different depth share an axis of relative depth.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "metric", "texts", "curvature", v) for k, v in enumerate([1.0, 2.0, 1.5])]
        >>> figure = plot_metrics(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['curvature']
    """
    return draw(metrics_chart(frame))


def write_metrics_figure(frame: pl.DataFrame, path: str | Path) -> Path:
    """Write the figure of :func:`plot_metrics` in the format that the suffix selects, and return the path."""
    return write_figure(plot_metrics(frame), Path(path))


def metrics_chart(frame: pl.DataFrame, *, chosen: int | None = None) -> charts.Chart:
    """Return a panel for each metric with a curve for each model and dataset; ``chosen`` is a layer to mark."""
    frame = check_frame(frame)
    metrics = metric_series(frame)
    if not metrics:
        raise OptionError("`frame` must have rows of kind 'metric' to plot metrics, but got none.")
    labels = list(dict.fromkeys(series.label for many in metrics.values() for series in many))
    depths = {number_of_layers(part) for _, part in frame.group_by("model", "revision")} - {0}
    relative = len(depths) > 1
    x = charts.DEPTH if relative else charts.layer_axis(max(depths, default=0))
    rules = [] if chosen is None else [charts.Rule(chosen, "chosen")]
    panels = []
    for name, many in metrics.items():
        lines = [
            charts.Line(
                series.depths if relative else series.layers,
                series.values,
                series.label,
                labels.index(series.label),
                charts.layer_tips(series.label or name, series.layers, series.values),
            )
            for series in many
        ]
        panels.append(charts.Panel(name, x, charts.value_axis(lines), (*rules, *lines), f"{name} by layer"))
    return charts.Chart(tuple(panels))


def gap_text(chart: charts.Chart, reason: str = "Not finite at some layers") -> str:
    """Return a sentence, after a space, that names the panels whose curves have gaps; empty if there are none."""
    titles = [
        panel.title for panel in chart.panels if not all(math.isfinite(y) for line in panel.lines for y in line.y)
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
    parts: list[charts.Part] = []
    for style, (label, table) in enumerate(tables.items()):
        layers, accuracy = tuple(table["layer"]), tuple(100 * table["accuracy"])
        band = tuple(zip(100 * table["low"], 100 * table["high"], strict=True))
        parts.append(charts.Line(layers, accuracy, label, style, band=band))
        best = table["validation" if "validation" in table.columns else "accuracy"].arg_max() or 0
        parts.append(charts.Dots((layers[best],), (accuracy[best],), style=style))
    if chance is not None:
        text = f"guessing ({chance:.0%})"
        parts.append(charts.Level(100 * chance, text, text))
    panel = charts.Panel(title, charts.layer_axis(num_layers), charts.value_axis(parts, "accuracy, %"), tuple(parts))
    return draw(charts.Chart((panel,), size=(7.2, 3.6)))


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
    return draw(selection_chart(frame, layer=layer, rule=rule, choices=choices, num_layers=num_layers))


def selection_chart(
    frame: pl.DataFrame, *, layer: int, rule: str, choices: Mapping[str, int], num_layers: int
) -> charts.Chart:
    """Return the panels of :func:`plot_selection`: choices, scores, metrics."""
    frame = check_frame(frame)
    names = frame.select("kind", "name", "dataset").unique(maintain_order=True).rows()
    panels = [_choices_panel(choices, layer, rule, num_layers)]
    for kind, name, dataset in sorted(names, key=lambda row: row[0] != "score"):
        rows = frame.filter(kind=kind, name=name, dataset=dataset).sort("layer")
        line = charts.Line(tuple(rows["layer"]), tuple(rows["value"]))
        title = f"{name}: {dataset}" if kind == "score" else name
        panels.append(
            charts.Panel(
                title, charts.layer_axis(num_layers), charts.value_axis([line]), (charts.Rule(layer, "chosen"), line)
            )
        )
    return charts.Chart(tuple(panels), head=True)


def _choices_panel(choices: Mapping[str, int], layer: int, rule: str, num_layers: int) -> charts.Panel:
    parts: list[charts.Part] = [charts.Rule(layer, "chosen")]
    for row, (name, choice) in enumerate(choices.items()):
        selected = name == rule
        tip = f"{name}: layer {choice}"
        parts.append(charts.Mark("best", choice, row, "") if selected else charts.Dots((choice,), (row,), tips=(tip,)))
        parts.append(charts.Word(choice, row, str(choice), bold=selected))
    labels = [name.replace("+dataset", "+\ndataset") if len(name) > 30 else name for name in choices]
    return charts.Panel(
        f"layer {layer}, by {rule}", charts.layer_axis(num_layers), charts.named_axis(labels), tuple(parts)
    )


def plot_correlations(frame: pl.DataFrame, *, statistics: Sequence[str] = ("dcor", "spearman", "kendall")) -> Figure:
    """Return a figure with a panel for each statistic, a row for each metric and a color for each model.

    Large dots are averages over tasks with their intervals, small ones single tasks.

    Args:
        frame: returned by :func:`midlayer_encoders.comparing.correlation.correlate`.
        statistics: the panels from left to right.
    """
    return draw(correlations_chart(frame, statistics))


def correlations_chart(frame: pl.DataFrame, statistics: Sequence[str]) -> charts.Chart:
    """Return the panels of :func:`plot_correlations`."""
    if frame.is_empty():
        raise OptionError("`frame` must have correlations to plot, but got none.")
    for name in statistics:
        check_choice("statistics", name, _STATISTICS)
    metrics = frame["metric"].unique(maintain_order=True).to_list()
    models = frame.select("model", "revision").unique(maintain_order=True).rows()
    panels = []
    for statistic in statistics:
        rows = frame.filter(statistic=statistic)
        groups = {
            model_label(frame, model, revision, ", "): rows.filter(model=model, revision=revision)
            for model, revision in models
        }
        x = charts.Axis("", 0 if statistic == "dcor" else -1, 1)
        panels.append(
            charts.Panel(_STATISTICS[statistic], x, charts.named_axis(metrics), _correlation_parts(groups, metrics))
        )
    height = 1.0 + len(metrics) * (0.22 + 0.2 * len(models))
    return charts.Chart(tuple(panels), columns=len(panels), size=(1.6 / len(panels) + 3.1, height))


def correlation_panels(
    frame: pl.DataFrame, *, statistics: Sequence[str] = ("spearman", "kendall", "dcor")
) -> list[charts.Panel]:
    """Return the correlation of each metric with the mean score, a panel for each model (Figures 3, 8 and 9).

    Args:
        frame: returned by :func:`~midlayer_encoders.comparing.correlation.correlate`.
        statistics: to draw.
    """
    rows = frame.filter(
        pl.col("task") == "average", pl.col("statistic").is_in(statistics), pl.col("value").is_not_null()
    )
    if rows.is_empty():
        notes = ", ".join(frame["note"].unique().drop_nulls().to_list())
        raise OptionError(f"`frame` must hold a correlation to draw, but none is defined: {notes}.")
    names = rows["metric"].unique(maintain_order=True).to_list()
    x = charts.Axis("correlation with the mean score", -1, 1)
    y = charts.named_axis([name.replace("_", " ") for name in names])
    panels = []
    for (model,), model_rows in rows.group_by("model", maintain_order=True):
        groups = {statistic: model_rows.filter(statistic=statistic) for statistic in statistics}
        panels.append(charts.Panel(str(model), x, y, _correlation_parts(groups, names)))
    return panels


def model_label(frame: pl.DataFrame, model: object, revision: object, separator: str = " ") -> str:
    """Return the model's name, and its revision if the frame holds several."""
    several = frame.filter(pl.col("model") == model)["revision"].n_unique() > 1
    return f"{model}{separator}{revision}" if several else str(model)


def _correlation_parts(groups: Mapping[str, pl.DataFrame], metrics: Sequence[str]) -> tuple[charts.Part, ...]:
    """Return dots of tasks and averages for each group, and a text where an average is undefined."""
    parts: list[charts.Part] = [charts.Rule(0)]
    for style, (label, rows) in enumerate(groups.items()):
        offset = (style - (len(groups) - 1) / 2) * 0.7 / len(groups)
        defined, average = pl.col("value").is_not_null(), pl.col("task") == "average"
        undefined = rows.filter(~defined, average)["metric"]
        parts += [
            _correlation_dots(rows.filter(defined, ~average), metrics, offset, "dot", "", style),
            _correlation_dots(
                rows.filter(defined, average), metrics, offset, "disc", label if len(groups) > 1 else "", style
            ),
            *(charts.Word(0, metrics.index(metric) + offset, "undefined", centered=True) for metric in undefined),
        ]
    return tuple(parts)


def _correlation_dots(
    rows: pl.DataFrame, metrics: Sequence[str], offset: float, kind: Literal["disc", "dot"], label: str, style: int
) -> charts.Dots:
    """Return a dot for each row; discs have intervals."""
    spans = tuple(rows.select(pl.col("low", "high").fill_null(pl.col("value"))).rows())
    tips = tuple(
        f"{metric}, {task}: {value:.3f} ({low:.3f} to {high:.3f})"
        for metric, task, value, (low, high) in zip(rows["metric"], rows["task"], rows["value"], spans, strict=True)
    )
    y = tuple(metrics.index(metric) + offset for metric in rows["metric"])
    return charts.Dots(tuple(rows["value"]), y, kind, label, style, tips, spans if kind == "disc" else ())
