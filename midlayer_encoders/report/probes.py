"""The figure of probes: accuracy by layer with its interval, several models or probes beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.axes import SOFT, layer_axis
from midlayer_encoders.report.style import DASHES, SERIES

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

__all__ = ["plot_probes"]


def plot_probes(
    tables: Mapping[str, pl.DataFrame], *, num_layers: int, chance: float | None = None, title: str = ""
) -> Figure:
    """Return a figure of accuracy in per cent by layer; the bands are the intervals, the discs the best layers.

    Args:
        tables: by label, each with the columns ``layer``, ``accuracy``, ``low``, ``high`` and, where an epoch or layer
            was chosen, ``validation``, by which the best layer is marked.
        num_layers: number of blocks.
        chance: accuracy of guessing, a line.
        title: above the figure.

    Example:
        >>> import polars as pl
        >>> table = pl.DataFrame({"layer": [0, 1], "accuracy": [0.4, 0.6], "low": [0.3, 0.5], "high": [0.5, 0.7]})
        >>> plot_probes({"m": table}, num_layers=1, chance=0.1, title="digits").axes[0].get_title(loc="left")
        'digits'
    """
    from matplotlib.figure import Figure

    if not tables:
        raise OptionError("`tables` must hold at least one table, but got none.")
    rows = -(-(len(tables) + 1) // 3)
    figure = Figure(figsize=(7.2, 3.8 + 0.22 * rows), layout="constrained")
    axes = figure.subplots()
    for place, (label, table) in enumerate(tables.items()):
        colour, layers = SERIES[place % len(SERIES)], table["layer"].to_list()
        dashes = DASHES[place // len(SERIES) % len(DASHES)]
        line = (0, tuple(float(part) for part in dashes.split())) if dashes else "-"
        accuracy = [100 * value for value in table["accuracy"]]
        axes.fill_between(layers, 100 * table["low"], 100 * table["high"], color=colour, alpha=0.15, linewidth=0)
        axes.plot(layers, accuracy, color=colour, linestyle=line, linewidth=1.8, marker="o", markersize=3, label=label)
        chosen = table["validation" if "validation" in table.columns else "accuracy"].arg_max() or 0
        axes.plot(layers[chosen], accuracy[chosen], "o", color=colour, markersize=8, markeredgecolor="white")
    if chance is not None:
        axes.axhline(100 * chance, color=SOFT, linestyle="--", linewidth=1, label=f"guessing ({chance:.0%})")
    layer_axis(axes, num_layers)
    axes.set_ylabel("accuracy, %", fontsize=9, color=SOFT)
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside upper left", ncols=min(len(tables) + (chance is not None), 3), frameon=False, fontsize=9)
    return figure
