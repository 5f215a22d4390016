"""The figure of a selection: what the rules read, by layer, and what each of them chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame import check_frame
from midlayer_encoders.report.axes import BEST, INK, SOFT, columns_for, grid, layer_axis
from midlayer_encoders.report.style import SERIES
from midlayer_encoders.report.ticks import padded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_selection"]


def plot_selection(
    frame: pl.DataFrame, *, layer: int, rule: str, choices: Mapping[str, int], num_layers: int
) -> Figure:
    """Return a figure with the choice of every rule above a panel for each metric and score that they read.

    Args:
        frame: tidy results of one model; may be empty, as when no text was read.
        layer: the chosen layer.
        rule: whose choice it is.
        choices: the layer of every rule that answers.
        num_layers: number of blocks of the model.
    """
    frame = check_frame(frame)
    names = frame.select("kind", "name", "dataset").unique(maintain_order=True).rows()
    shown = [row for row in names if row[0] == "score"] + [row for row in names if row[0] == "metric"]
    figure, (top, *panels) = grid(len(shown), columns=columns_for(len(shown)) if shown else 1, head=True)
    _draw_choices(top, choices, layer, rule)
    layer_axis(top, num_layers)
    for axes, (kind, name, dataset) in zip(panels, shown, strict=True):
        rows = frame.filter(kind=kind, name=name, dataset=dataset).sort("layer")
        axes.plot(rows["layer"], rows["value"], color=SERIES[0], linewidth=1.6, marker="o", markersize=2.5)
        axes.axvline(layer, color=BEST, linewidth=1.2, linestyle=":")
        axes.set_ylim(padded(rows["value"].to_list()))
        axes.set_title(f"{name}: {dataset}" if kind == "score" else name, loc="left", fontsize=10)
        layer_axis(axes, num_layers)
    return figure


def _draw_choices(axes: Axes, choices: Mapping[str, int], layer: int, rule: str) -> None:
    """Draw a row for each rule, from the first to the last, with its layer as a dot."""
    for row, (name, chosen) in enumerate(choices.items()):
        own = name == rule
        axes.plot(chosen, row, "o", color=BEST if own else SERIES[0], markersize=8 if own else 5)
        axes.annotate(
            str(chosen), (chosen, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8,
            color=BEST if own else INK, weight="bold" if own else "normal",
        )  # fmt: skip
    axes.axvline(layer, color=BEST, linewidth=1.2, linestyle=":", zorder=0)
    labels = [name.replace("+dataset", "+\ndataset") if len(name) > 30 else name for name in choices]
    axes.set_yticks(range(len(choices)), labels, fontsize=8, color=SOFT)
    axes.set_ylim(len(choices) - 0.5, -0.5)
    axes.set_title(f"layer {layer}, by {rule}", loc="left", fontsize=11)
