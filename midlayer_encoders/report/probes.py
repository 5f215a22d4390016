"""Probes over depth: accuracy by layer with its interval, several models or probes beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.axes import layer_axis
from midlayer_encoders.report.charts import Chart, Dots, Level, Line, Panel, Part, value_axis
from midlayer_encoders.report.matplotlib_figures import draw

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

__all__ = ["plot_probes", "probes_chart"]


def plot_probes(
    tables: Mapping[str, pl.DataFrame], *, num_layers: int, chance: float | None = None, title: str = ""
) -> Figure:
    """Return a figure of accuracy in percent by layer; the bands are the intervals, the discs the best layers.

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
    return draw(probes_chart(tables, num_layers=num_layers, chance=chance, title=title))


def probes_chart(
    tables: Mapping[str, pl.DataFrame], *, num_layers: int, chance: float | None = None, title: str = ""
) -> Chart:
    """Return the panel of :func:`plot_probes`."""
    if not tables:
        raise OptionError("`tables` must hold at least one table, but got none.")
    parts: list[Part] = []
    for place, (label, table) in enumerate(tables.items()):
        layers, accuracy = tuple(table["layer"]), tuple(100 * table["accuracy"])
        band = tuple(zip(100 * table["low"], 100 * table["high"], strict=True))
        parts.append(Line(layers, accuracy, label, place, band=band))
        best = table["validation" if "validation" in table.columns else "accuracy"].arg_max() or 0
        parts.append(Dots((layers[best],), (accuracy[best],), style=place))
    if chance is not None:
        words = f"guessing ({chance:.0%})"
        parts.append(Level(100 * chance, words, words))
    panel = Panel(
        title, layer_axis(num_layers), value_axis(parts, "accuracy, %"), tuple(parts), f"accuracy by layer {title}"
    )
    return Chart((panel,), size=(7.2, 3.6))
