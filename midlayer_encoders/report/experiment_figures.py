"""The figures of the paper's experiments, by matplotlib: panels of curves, correlations, rules and theorems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.axes import MISSING, SOFT, columns_for, grid, layer_axis
from midlayer_encoders.report.experiments import Panel, shared_labels
from midlayer_encoders.report.steps import step_colours
from midlayer_encoders.report.style import DASHES, SERIES
from midlayer_encoders.report.ticks import padded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["correlation_figure", "panels_figure", "rule_figure", "theorem_figure"]


def panels_figure(panels: Sequence[Panel], *, title: str = "") -> Figure:
    """Return a figure of panels; one legend for all where they share their labels, else one in each.

    Example:
        >>> from midlayer_encoders.report.experiments import Trace
        >>> panel = Panel("entropy", "layer", (Trace("p = 0", (0, 1), (1.0, 2.0)), Trace("p = 1", (0, 1), (1.0, 1.5))))
        >>> [line.get_ydata().tolist() for line in panels_figure([panel]).axes[0].lines]
        [[1.0, 2.0], [1.0, 1.5]]
    """
    if not panels or not all(panel.traces for panel in panels):
        raise OptionError("`panels` must hold curves to draw, but got none.")
    labels = shared_labels(panels)
    shared = len(labels) > 1
    wide = 2 if len(panels) in (2, 4) else columns_for(len(panels))
    figure, axes = grid(len(panels), columns=wide, legend=len(labels) if shared else 0)
    figure.set_size_inches(
        max(figure.get_figwidth(), 4.2 * wide, 7.0 if len(labels) > 2 else 0.0),
        figure.get_figheight() + 0.6 * -(-len(panels) // wide),
    )
    for one, panel in zip(axes, panels, strict=True):
        _draw(one, panel, labels or [trace.label for trace in panel.traces])
        if not labels and len(panel.traces) > 1:
            one.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))  # never over a curve
    if shared:
        drawn = [(word, handle) for one in axes for handle, word in zip(*one.get_legend_handles_labels(), strict=True)]
        found = {word: dict(reversed(drawn))[word] for word in labels}
        columns = 6 if max(map(len, labels)) < 20 else max(1, int(figure.get_figwidth() // 3.2))
        figure.legend(
            list(found.values()), list(found), loc="outside upper left", ncols=columns, frameon=False, fontsize=8
        )
    if title:
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _draw(axes: Axes, panel: Panel, labels: Sequence[str]) -> None:
    colours = step_colours(len(panel.traces)) if panel.ordered else None
    for trace in panel.traces:
        place = labels.index(trace.label)
        colour = colours(place) if colours is not None else SERIES[place % len(SERIES)]
        dashes = "" if panel.ordered else DASHES[place // len(SERIES) % len(DASHES)]
        axes.plot(
            trace.x, trace.y, color=colour, linewidth=1.6, label=trace.label,
            linestyle=(0, tuple(float(part) for part in dashes.split())) if dashes else "-",
        )  # fmt: skip
        if trace.band:
            axes.fill_between(trace.x, *zip(*trace.band, strict=True), color=colour, alpha=0.15, linewidth=0)  # type: ignore[arg-type]
    values = [value for trace in panel.traces for value in (*trace.y, *(end for ends in trace.band for end in ends))]
    axes.set_ylim(padded([value for value in values if math.isfinite(value)] or [0.0]))
    axes.set_title(panel.title, loc="left", fontsize=9)
    layer_axis(axes, max(1, math.ceil(panel.end)))
    axes.set_xlabel(panel.x_label, fontsize=8, color=SOFT)


def correlation_figure(frame: pl.DataFrame, *, statistics: Sequence[str] = ("spearman", "kendall", "dcor")) -> Figure:
    """Return how each metric goes with the mean score: a dot and its interval for each statistic (Figures 3, 8, 9).

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
    models = rows["model"].unique(maintain_order=True).to_list()
    names = rows["metric"].unique(maintain_order=True).to_list()
    figure, panels = grid(len(models), columns=columns_for(len(models)), legend=len(statistics))
    figure.set_size_inches(max(figure.get_figwidth(), 5.5), 0.32 * len(names) * -(-len(models) // 3) + 1.6)
    for axes, model in zip(panels, models, strict=True):
        for place, statistic in enumerate(statistics):
            some = rows.filter(pl.col("model") == model, pl.col("statistic") == statistic)
            y = [names.index(name) + 0.22 * (place - (len(statistics) - 1) / 2) for name in some["metric"]]
            axes.plot(some["value"], y, "o", color=SERIES[place], markersize=5, label=statistic)
            axes.hlines(
                y,
                some["low"].fill_null(some["value"]),
                some["high"].fill_null(some["value"]),
                color=SERIES[place],
                linewidth=1.2,
            )
        axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.axvline(0, color=SOFT, linewidth=0.8)
        axes.set_xlim(-1.05, 1.05)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=SOFT, length=0)
        axes.set_title(model, loc="left", fontsize=10)
    handles, words = panels[0].get_legend_handles_labels()
    figure.legend(handles, words, loc="outside upper left", ncols=len(words), frameon=False, fontsize=8)
    return figure


def rule_figure(frame: pl.DataFrame) -> Figure:
    """Return the mean score over tasks of the layers that each rule chooses, a panel for each model (Table 2).

    Args:
        frame: a row for each model, task (``dataset``) and rule (``name``).
    """
    models = frame["model"].unique(maintain_order=True).to_list()
    rules = frame["name"].unique(maintain_order=True).to_list()
    columns = min(len(models), 2)
    figure, panels = grid(len(models), columns=columns)
    figure.set_size_inches(4.4 * columns, (0.26 * len(rules) + 0.7) * -(-len(models) // columns))
    for axes, model in zip(panels, models, strict=True):
        means = frame.filter(pl.col("model") == model).group_by("name").agg(100 * pl.col("value").mean())
        points = dict(means.iter_rows())
        held = [rule for rule in rules if rule in points]
        y = [rules.index(rule) for rule in held]
        axes.hlines(y, points["last"], [points[rule] for rule in held], color=MISSING, linewidth=2)
        axes.plot([points[rule] for rule in held], y, "o", color=SERIES[0], markersize=6)
        axes.axvline(points["last"], color=SOFT, linewidth=0.8)
        axes.set_yticks(range(len(rules)), rules)
        axes.set_ylim(len(rules) - 0.4, -0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=SOFT, length=0)
        axes.set_title(model, loc="left", fontsize=9)
        axes.set_xlabel("mean score, points; the line is the last layer", fontsize=8, color=SOFT)
    return figure


def theorem_figure(frame: pl.DataFrame, statements: Mapping[str, str]) -> Figure:
    """Return left over right side of every draw of every statement, on a logarithmic axis; 1 is equality.

    Args:
        frame: of :func:`~midlayer_encoders.paper.theorems.check_theorems`.
        statements: what each says, in the order to draw.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 0.42 * len(statements) + 0.8), layout="constrained")
    axes = figure.subplots()
    sides = frame.pivot("name", index=["statement", "draw", "holds"], values="value")
    for place, statement in enumerate(statements):
        rows = sides.filter(pl.col("statement") == statement)
        for holds, colour in ((True, SERIES[0]), (False, SERIES[1])):
            some = rows.filter(pl.col("holds") == holds)
            axes.plot(some["left"] / some["right"], [place] * len(some), "|", color=colour, markersize=11)
        held = f"holds in {rows['holds'].sum()} of {len(rows)}"
        axes.text(1.01, place, held, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color=SOFT)
    axes.set_xscale("log")
    axes.axvline(1, color=SOFT, linewidth=0.8)
    axes.set_yticks(range(len(statements)), [f"{name}:\n{text}" for name, text in statements.items()])
    axes.set_ylim(len(statements) - 0.4, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize=7, colors=SOFT)
    axes.set_xlabel("left side / right side of each draw", fontsize=8, color=SOFT)
    return figure
