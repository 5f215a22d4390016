"""The page and the charts of the paper's experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from benchmarks.paper.setting import model_label
from midlayer_encoders.errors import OptionError, pluralize
from midlayer_encoders.frame.schema import check_frame
from midlayer_encoders.report import drawing
from midlayer_encoders.report.layer_charts import plot_metrics
from midlayer_encoders.report.style import LIGHT, SERIES
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


@dataclass(frozen=True)
class LabeledCurve:
    """A curve to draw; ``band`` holds the lower and upper ends of an interval at each position."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


def plot_curves(panels: Mapping[str, Sequence[LabeledCurve]], x_label: str, *, ordered: bool = False) -> Figure:
    """Return a panel for each title; curves with the same label have the same style.

    Args:
        panels: the curves by title of the panel.
        x_label: of the horizontal axis.
        ordered: whether the curves are steps of one quantity.

    Example:
        >>> curves = [LabeledCurve("p = 0", (0, 1), (1.0, 2.0)), LabeledCurve("p = 1", (0, 1), (1.0, 1.5))]
        >>> figure = plot_curves({"entropy": curves}, "layer")
        >>> [line.get_ydata().tolist() for line in figure.axes[0].lines]
        [[1.0, 2.0], [1.0, 1.5]]
    """
    if not any(panels.values()):
        raise OptionError("`panels` must hold curves to draw, but got none.")
    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    figure, grid = drawing.panel_grid(len(panels), size=(4.2, 2.8))
    for axes, (title, curves) in zip(grid, panels.items(), strict=True):
        for curve in curves:
            drawing.draw_points(
                axes,
                curve.x,
                curve.y,
                label=curve.label if len(labels) > 1 else "",
                style=labels.index(curve.label),
                band=curve.band,
                ordered=ordered * len(labels),
            )
        drawing.layer_axis(axes, math.ceil(max(max(curve.x) for curve in curves)), x_label)
        drawing.set_title(axes, title)
    return drawing.finish(figure)


def score_curves(frame: pl.DataFrame) -> list[LabeledCurve]:
    """Return the mean score over tasks by depth in percent, in points, for each model.

    Layers that were not scored on every task of the model are left out.
    """
    scores = check_frame(frame).filter(pl.col("kind") == "score")
    if scores.is_empty():
        raise OptionError("`frame` must have rows of kind 'score' to draw scores by depth, but got none.")
    curves = []
    for (model, revision), part in scores.group_by("model", "revision", maintain_order=True):
        num_tasks = part["dataset"].n_unique()
        mean = part.group_by("layer", "depth").agg(pl.col("value").mean(), pl.len()).filter(pl.col("len") == num_tasks)
        mean = mean.sort("layer")
        label = f"{model_label(scores, model, revision)} ({pluralize(num_tasks, 'task')})"
        curves.append(LabeledCurve(label, (100 * mean["depth"]).to_list(), (100 * mean["value"]).to_list()))
    return curves


def plot_score_curves(frame: pl.DataFrame) -> Figure:
    """Return the curves of :func:`score_curves` (Figure 1)."""
    return plot_curves({"mean score, points": score_curves(frame)}, "depth, % of the layers")


def plot_entropies(frame: pl.DataFrame) -> Figure:
    """Return prompt and dataset entropy by depth (Figures 2, 12)."""
    return plot_metrics(pl.concat(frame.filter(name=name) for name in ("prompt_entropy", "dataset_entropy")))


def plot_along(frame: pl.DataFrame, *, depths: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> Figure:
    """Return prompt entropy along the text at several depths, a curve with its deviation for each model (Figure 5).

    Positions that fewer than half of the texts reach are left out.
    """
    panels = {}
    for depth in depths:
        drawn_layers = set()
        curves = []
        for (model, revision), part in frame.group_by("model", "revision", maintain_order=True):
            reached = part.filter(pl.col("texts") >= pl.col("texts").max() / 2)
            layers = reached["layer"].unique().sort().to_list()
            layer = min(layers, key=lambda layer: (abs(layer - depth * max(layers)), layer))
            drawn_layers.add(layer)
            rows = reached.filter(pl.col("layer") == layer).sort("position")
            band = (rows["value"] - rows["deviation"]).to_list(), (rows["value"] + rows["deviation"]).to_list()
            label = model_label(frame, model, revision)
            curves.append(LabeledCurve(label, rows["position"].to_list(), rows["value"].to_list(), band))
        names = " and ".join(map(str, sorted(drawn_layers)))
        panels[f"layer{'s'[: len(drawn_layers) - 1]} {names}, {100 * depth:g} % of the depth"] = curves
    return plot_curves(panels, "tokens so far")


_CONDITIONS = {
    "repetition": "repetition: tokens become one token of the text",
    "resampling": "resampling: tokens become others of the text",
    "randomness": "randomness: tokens become any of the vocabulary",
    "length": "length: the first n tokens, nats",
}


def plot_prompts(frame: pl.DataFrame) -> Figure:
    """Return prompt entropy by layer, a panel for each condition and a curve for each amount (Figure 6)."""
    several = frame["model"].n_unique() > 1
    panels = {}
    for (model, condition), part in frame.group_by("model", "condition", maintain_order=True):
        pattern = "{:g} tokens" if condition == "length" else "p = {:g}"
        title = _CONDITIONS.get(str(condition), str(condition)) + (f" ({model})" if several else "")
        panels[title] = _curves(part.sort("amount", "layer"), "amount", "layer", pattern)
    return plot_curves(panels, "layer", ordered=True)


def plot_orders(frame: pl.DataFrame) -> Figure:
    """Return the entropy of power-law spectra, and the share of the smaller half, by exponent (Figure 7)."""
    titles = {"matrix_entropy": "entropy / log n", "tail_share": "share of the smaller half of the eigenvalues"}
    panels = {
        titles[str(name)]: _curves(part.sort("alpha", "beta"), "alpha", "beta", "α = {:g}")
        for (name,), part in frame.group_by("name", maintain_order=True)
    }
    return plot_curves(panels, "exponent β of the spectrum", ordered=True)


def plot_subblocks(frame: pl.DataFrame) -> Figure:
    """Return each token metric by layer, a curve for each point inside the blocks (Figure 15).

    ``residual_in`` is left out because it equals ``residual_out`` of the previous layer.
    """
    several = frame["model"].n_unique() > 1
    sites = frame.filter(pl.col("site") != "residual_in").with_columns(pl.col("site").str.replace_all("_", " "))
    panels = {
        f"{name} ({model})" if several else str(name): _curves(part.sort("layer"), "site", "layer")
        for (model, name), part in sites.group_by("model", "name", maintain_order=True)
    }
    return plot_curves(panels, "layer")


def plot_rules(frame: pl.DataFrame) -> Figure:
    """Return the mean score over tasks of the layers that each rule selects, a panel for each model (Table 2).

    Args:
        frame: a row for each model, task (``dataset``) and rule (``name``).
    """
    rules = frame["name"].unique(maintain_order=True).to_list()
    count = frame["model"].n_unique()
    size = (3.5 + 0.06 * max(map(len, rules)), 0.3 * len(rules) + 0.8)
    figure, panels = drawing.panel_grid(count, columns=min(count, 2), size=size)
    for axes, ((model,), rows) in zip(panels, frame.group_by("model", maintain_order=True), strict=True):
        means = dict(rows.group_by("name").agg(100 * pl.col("value").mean()).iter_rows())
        scored = [rule for rule in rules if rule in means]
        x = [means[rule] for rule in scored]
        y = [rules.index(rule) for rule in scored]
        _name_rows(axes, rules)
        axes.hlines(y, means["last"], x, color=SERIES[0], linewidth=1.4)
        drawing.draw_points(axes, x, y, "disc")
        drawing.draw_rule(axes, means["last"])
        axes.set_xlim(drawing.pad_range(x, 0.12))
        axes.set_xlabel("mean score, points; the line is the last layer")
        drawing.set_title(axes, str(model))
    return drawing.finish(figure)


def _curves(rows: pl.DataFrame, by: str, x: str, pattern: str = "{}") -> list[LabeledCurve]:
    """Return a curve for each value of a column, labeled by ``pattern``."""
    groups = rows.group_by(by, maintain_order=True)
    return [LabeledCurve(pattern.format(key), part[x].to_list(), part["value"].to_list()) for (key,), part in groups]


def plot_correlations(frame: pl.DataFrame, *, statistics: Sequence[str] = ("dcor", "spearman", "kendall")) -> Figure:
    """Return a figure with a panel for each statistic, a row for each metric and a color for each model.

    Large dots are averages over tasks, small ones single tasks (Figures 3, 8 and 9). A large dot beyond the end of its
    line stands out of the shifted curves; there is no line where there are too few layers for that.

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
        _name_rows(axes, [metric.replace("_", " ") for metric in metrics])
        axes.set_xlabel("correlation with the score; line: chance")
        drawing.set_title(axes, _STATISTICS[statistic])
    return drawing.finish(figure)


def _draw_correlations(axes: Axes, groups: Mapping[str, pl.DataFrame], metrics: Sequence[str], low: float) -> None:
    """Draw small dots for tasks and large ones for averages of each group, and a text where one is undefined."""
    drawing.draw_rule(axes, 0)
    for style, (label, rows) in enumerate(groups.items()):
        offset = (style - (len(groups) - 1) / 2) * 0.7 / len(groups)
        for average in (False, True):
            part = rows.filter(pl.col("value").is_not_null(), (pl.col("task") == "average") == average)
            ends = part["threshold"].fill_null(0).to_list()
            y = [metrics.index(metric) + offset for metric in part["metric"]]
            if average:
                color = SERIES[style % len(SERIES)]
                axes.hlines(y, [low * end for end in ends], ends, color=color, linewidth=1.4)
            drawing.draw_points(
                axes,
                part["value"].to_list(),
                y,
                "disc" if average else "dot",
                label=label if average and len(groups) > 1 else "",
                style=style,
            )
        for metric in rows.filter(pl.col("value").is_null(), pl.col("task") == "average")["metric"]:
            box = {"facecolor": LIGHT["page"], "edgecolor": "none", "pad": 1}
            axes.text(0, metrics.index(metric) + offset, "undefined", ha="center", va="center", fontsize=8, bbox=box)
    margin = 0.03 * (1 - low)
    axes.set_xlim(low - margin, 1 + margin)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of a vertical axis, the first at the top; only the left column of panels shows the names."""
    cell = axes.get_subplotspec()
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelleft=cell is None or cell.is_first_col())
