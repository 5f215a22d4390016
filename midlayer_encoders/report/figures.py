"""The same pictures for papers and terminals, by matplotlib; nothing global is touched, the figure is returned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import Series, check_frame, metric_series, number_of_layers
from midlayer_encoders.frame.summaries import Curve, summary
from midlayer_encoders.report.axes import BEST, INK, MISSING, SOFT, columns_for, grid, layer_axis
from midlayer_encoders.report.heat import losses, widest_loss
from midlayer_encoders.report.style import DASHES, SERIES
from midlayer_encoders.report.ticks import number, padded, signed

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_heatmap", "plot_metrics", "plot_scores", "write_metrics_figure"]


def plot_metrics(frame: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric, over layers; models and texts are told apart by colour.

    Models of different depth share an axis of relative depth instead of layers.

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
    depths = {number_of_layers(part) for _, part in frame.group_by("model", "revision")} - {0}
    relative = len(depths) > 1
    labels = list(dict.fromkeys(series.label for many in metrics.values() for series in many))
    figure, panels = grid(len(metrics), columns=columns_for(len(metrics)), legend=len(labels) if len(labels) > 1 else 0)
    for axes, (name, many) in zip(panels, metrics.items(), strict=True):
        for series in many:
            _draw_series(axes, series, labels.index(series.label), relative=relative)
        finite = [value for series in many for value in series.values if math.isfinite(value)]
        axes.set_ylim(padded(finite or [0.0]))
        axes.set_title(name, loc="left", fontsize=10)
        layer_axis(axes, 0 if relative else max(depths, default=0), relative=relative)
    if len(labels) > 1:
        handles, texts = _handles(figure.axes)
        figure.legend(handles, texts, loc="outside upper left", ncols=min(len(texts), 3), frameon=False, fontsize=9)
    return figure


def plot_scores(frame: pl.DataFrame) -> Figure:
    """Return a figure of the average score by layer and a panel for each task, best and last layer marked.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_scores(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> figure.axes[0].get_title(loc="left")
        'STS (spearman): best 60.0 at layer 1, +10.0 points over the last'
    """
    found = summary(frame)
    if not found.tasks:
        raise OptionError("`frame` must have rows of kind 'score' to plot scores, but got none.")
    alone = len(found.tasks) == 1
    columns = 1 if alone else min(len(found.tasks), 3 if len(found.tasks) < 7 else 4)
    figure, (top, *panels) = grid(0 if alone else len(found.tasks), columns=columns, head=True)
    if found.average:
        _draw_curve(top, found.average, found.num_layers, words=True)
        name = f"{found.tasks[0].name} ({found.tasks[0].measure})" if alone else f"average of {len(found.tasks)} tasks"
        top.set_title(f"{name}: {_curve_words(found.average)}", loc="left", fontsize=11)
    else:
        top.set_axis_off()
        top.set_title("no layer was scored on every task: no average", loc="left", fontsize=11)
    for axes, task in zip(panels, found.tasks if not alone else (), strict=True):
        _draw_curve(axes, task, found.num_layers, words=False)
        axes.set_title(f"{task.name}\n{_short(task)}", loc="left", fontsize=9)
    figure.supylabel("points (score × 100)", fontsize=10, color=SOFT)
    return figure


def plot_heatmap(frame: pl.DataFrame) -> Figure:
    """Return a figure of layers by tasks: how many points each layer is below the same task's best.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> figure = plot_heatmap(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> [[float(round(value, 1)) for value in row] for row in figure.axes[0].images[0].get_array()]
        [[20.0, 0.0, 10.0]]
    """
    from matplotlib.figure import Figure

    found = summary(frame)
    if not found.tasks:
        raise OptionError("`frame` must have rows of kind 'score' to plot layers by tasks, but got none.")
    rows = [found.average, *found.tasks] if found.average and len(found.tasks) > 1 else list(found.tasks)
    layers = sorted(set().union(*(task.points for task in found.tasks)))
    values = [[losses(curve).get(layer, math.nan) for layer in layers] for curve in rows]
    figure = Figure(figsize=(max(6.0, 3.0 + 0.24 * len(layers)), 1.6 + 0.26 * len(rows)), layout="constrained")
    axes = figure.subplots()
    # Dark is near the best, also in grey; cells that were not measured show the ground behind.
    axes.set_facecolor(MISSING)
    image = axes.imshow(values, cmap="Blues_r", vmin=0, vmax=widest_loss(found.tasks), aspect="auto")
    peaks = [layers.index(curve.best_layer) for curve in rows]
    axes.scatter(peaks, range(len(rows)), s=36, facecolors="none", edgecolors="white", linewidths=1.6)
    axes.set_yticks(range(len(rows)), [curve.name for curve in rows], fontsize=9)
    every = max(1, -(-len(layers) // 12))
    axes.set_xticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]], fontsize=9)
    axes.set_xlabel("layer", fontsize=9, color=SOFT)
    axes.spines[:].set_visible(False)
    if len(rows) > len(found.tasks):
        axes.axhline(0.5, color="white", linewidth=3)
    axes.set_title("points below each task's best layer (ringed)", loc="left", fontsize=10)
    bar = figure.colorbar(
        image, ax=axes, extend="max", pad=0.02, aspect=max(12, len(rows)), extendfrac=min(0.6 / len(rows), 0.1)
    )
    bar.ax.tick_params(labelsize=8)
    return figure


def write_metrics_figure(frame: pl.DataFrame, path: str | Path) -> Path:
    """Write the figure of :func:`plot_metrics` and return where it lies; the ending decides the format."""
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    plot_metrics(frame).savefig(where, dpi=150)
    return where


def _draw_series(axes: Axes, series: Series, style: int, *, relative: bool) -> None:
    dashes = DASHES[style // len(SERIES) % len(DASHES)]
    axes.plot(
        series.depths if relative else series.layers,
        [value if math.isfinite(value) else math.nan for value in series.values],
        color=SERIES[style % len(SERIES)],
        linestyle=(0, tuple(float(part) for part in dashes.split())) if dashes else "-",
        linewidth=1.6,
        marker="o",
        markersize=2.5,
        label=series.label,
    )


def _draw_curve(axes: Axes, curve: Curve, num_layers: int, *, words: bool) -> None:
    layers, points = list(curve.points), list(curve.points.values())
    size = 8 if words else 5
    axes.plot(layers, points, color=SERIES[0], linewidth=1.8, marker="o", markersize=3 if words else 2)
    if curve.best_layer != curve.last_layer:
        axes.plot(curve.last_layer, curve.last, "s", color="white", markeredgecolor=INK, markersize=size - 1)
    axes.plot(curve.best_layer, curve.best, "o", color=BEST, markersize=size)
    axes.set_ylim(padded(points, pad=0.16 if words else 0.08))
    layer_axis(axes, num_layers)
    if not words:
        return
    above, beside = (0, 9), (14, -4)
    _say(axes, f"layer {curve.best_layer}: {number(curve.best)}", (curve.best_layer, curve.best), above, bold=True)
    if curve.best_layer == curve.last_layer:
        return
    _say(axes, f"last: {number(curve.last)}", (curve.last_layer, curve.last), beside)
    _say(axes, signed(curve.gain), (curve.last_layer, curve.best), beside, bold=True)
    right = curve.last_layer + 0.015 * max(num_layers, 1)
    axes.plot([curve.best_layer, right, right], [curve.best, curve.best, curve.last], ":", color=BEST, linewidth=1.2)


def _say(axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int], *, bold: bool = False) -> None:
    axes.annotate(
        text,
        at,
        xytext=offset,
        textcoords="offset points",
        ha="left" if offset[0] else "center",
        color=BEST if bold else INK,
        weight="bold" if bold else "normal",
        fontsize=9,
        annotation_clip=False,
    )


def _curve_words(curve: Curve) -> str:
    if len(curve.points) == 1:
        return f"{number(curve.best)} at layer {curve.best_layer}"
    if curve.best_layer == curve.last_layer:
        return f"the last layer is best, {number(curve.best)}"
    return f"best {number(curve.best)} at layer {curve.best_layer}, {signed(curve.gain)} points over the last"


def _short(curve: Curve) -> str:
    return f"{number(curve.best)} at {curve.best_layer}" + (
        f", last {number(curve.last)}" if curve.best_layer != curve.last_layer else ", the last"
    )


def _handles(panels: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """Return one handle for each label: a metric may lack some of the texts."""
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
