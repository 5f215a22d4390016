"""A selection: what the rules read, by layer, and what each of them chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.frame import check_frame
from midlayer_encoders.report.axes import layer_axis, named_axis
from midlayer_encoders.report.charts import Chart, Dots, Line, Mark, Panel, Part, Rule, Word, value_axis
from midlayer_encoders.report.matplotlib_figures import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_selection", "selection_chart"]


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
    return draw(selection_chart(frame, layer=layer, rule=rule, choices=choices, num_layers=num_layers))


def selection_chart(
    frame: pl.DataFrame, *, layer: int, rule: str, choices: Mapping[str, int], num_layers: int
) -> Chart:
    """Return the panels of :func:`plot_selection`, the choices first, then scores, then metrics."""
    frame = check_frame(frame)
    names = frame.select("kind", "name", "dataset").unique(maintain_order=True).rows()
    panels = [_choices(choices, layer, rule, num_layers)]
    for kind, name, dataset in sorted(names, key=lambda row: row[0] != "score"):
        rows = frame.filter(kind=kind, name=name, dataset=dataset).sort("layer")
        line = Line(tuple(rows["layer"]), tuple(rows["value"]))
        title = f"{name}: {dataset}" if kind == "score" else name
        panels.append(Panel(title, layer_axis(num_layers), value_axis([line]), (Rule(layer, "chosen"), line)))
    return Chart(tuple(panels), head=True)


def _choices(choices: Mapping[str, int], layer: int, rule: str, num_layers: int) -> Panel:
    """Return a row for each rule, from the first to the last, with its layer as a dot."""
    parts: list[Part] = [Rule(layer, "chosen")]
    for row, (name, chosen) in enumerate(choices.items()):
        own, tip = name == rule, f"{name}: layer {chosen}"
        parts.append(Mark("best", chosen, row, "") if own else Dots((chosen,), (row,), tips=(tip,)))
        parts.append(Word(chosen, row, str(chosen), bold=own))
    labels = [name.replace("+dataset", "+\ndataset") if len(name) > 30 else name for name in choices]
    return Panel(f"layer {layer}, by {rule}", layer_axis(num_layers), named_axis(labels), tuple(parts))
