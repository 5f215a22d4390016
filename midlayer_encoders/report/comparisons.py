"""Models side by side: differences with intervals, and how alike their layers are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.axes import DEPTH, layer_axis, place_axis
from midlayer_encoders.report.charts import Cells, Chart, Level, Line, Panel, Part, Scale, value_axis
from midlayer_encoders.report.matplotlib_figures import draw
from midlayer_encoders.report.ticks import number, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "DIFFERENCES",
    "SIMILARITY",
    "differences_chart",
    "plot_differences",
    "plot_similarity",
    "same_depth",
    "similarity_chart",
]

_PAIR = {"base": pl.String(), "model": pl.String(), "base_layer": pl.Int64(), "layer": pl.Int64()}

DIFFERENCES = pl.Schema(
    _PAIR
    | {"depth": pl.Float64(), "dataset": pl.String(), "name": pl.String()}
    | {column: pl.Float64() for column in ("difference", "low", "high")}
)
"""A row for each model, metric and pair of equally deep layers: the model minus the base, and its interval."""

SIMILARITY = pl.Schema(_PAIR | {"cka": pl.Float64()})
"""A row for each model, layer of it and layer of the base."""


def plot_differences(differences: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric: each model minus the base by layer, its interval shaded.

    Args:
        differences: with the columns of :data:`DIFFERENCES`.

    Example:
        >>> rows = [("a", "b", k, k, k / 2, "t", "lidar", 1.0, 0.5, 1.5) for k in range(3)]
        >>> figure = plot_differences(pl.DataFrame(rows, schema=DIFFERENCES, orient="row"))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].lines[1].get_ydata().tolist()
        ('lidar', [1.0, 1.0, 1.0])
    """
    return draw(differences_chart(differences))


def plot_similarity(similarity: pl.DataFrame) -> Figure:
    """Return a figure with a heat map for each model: CKA of each of its layers with each of the base's.

    The ring of each row stands at the base's layer that is most alike.

    Args:
        similarity: with the columns of :data:`SIMILARITY`.

    Example:
        >>> rows = [("a", "b", j, k, float(j == k)) for j in range(2) for k in range(2)]
        >>> figure = plot_similarity(pl.DataFrame(rows, schema=SIMILARITY, orient="row"))
        >>> figure.axes[0].images[0].get_array().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    return draw(similarity_chart(similarity))


def same_depth(differences: pl.DataFrame) -> bool:
    """Return whether the layers compared have the same number, so that layers can stand on an axis."""
    return differences.filter(pl.col("base_layer") != pl.col("layer")).is_empty()


def differences_chart(differences: pl.DataFrame) -> Chart:
    """Return a panel for each metric: the differences of each model, their intervals, and the level of none."""
    _check(differences, DIFFERENCES, "differences")
    models = differences["model"].unique(maintain_order=True).to_list()
    along = "base_layer" if same_depth(differences) else "depth"
    across = layer_axis(max(differences["base_layer"])) if along == "base_layer" else DEPTH
    panels = []
    for (name,), rows in differences.group_by("name", maintain_order=True):
        lines = [_line(rows.filter(pl.col("model") == model), along, place) for place, model in enumerate(models)]
        parts: tuple[Part, ...] = (Level(0.0, "no difference"), *lines)
        panels.append(Panel(str(name), across, value_axis(parts), parts, f"{name}: difference by layer"))
    return Chart(tuple(panels))


def similarity_chart(similarity: pl.DataFrame) -> Chart:
    """Return a map for each model: CKA of its layers with those of the base, on one scale."""
    _check(similarity, SIMILARITY, "similarity")
    panels = [_map(str(model), rows) for (model,), rows in similarity.group_by("model", maintain_order=True)]
    return Chart(tuple(panels), columns=min(len(panels), 3), size=(3.8, 3.3))


def _line(rows: pl.DataFrame, along: str, place: int) -> Line:
    rows = rows.sort("depth")
    band = tuple(zip(rows["low"], rows["high"], strict=True))
    tips = tuple(
        "layer {}: {} ({} to {})".format(layer, *(significant(value, 3, sign=True) for value in values))
        for layer, *values in rows.select("layer", "difference", "low", "high").iter_rows()
    )
    label = f"{rows['model'][0]} minus {rows['base'][0]}"
    return Line(tuple(rows[along]), tuple(rows["difference"]), label, place, tips, band)


def _map(model: str, rows: pl.DataFrame) -> Panel:
    base = rows["base"][0]
    layers, theirs = (sorted(rows[column].unique()) for column in ("layer", "base_layer"))
    known = {(layer, their): value for layer, their, value in rows.select("layer", "base_layer", "cka").iter_rows()}
    values = tuple(tuple(known.get((layer, their), math.nan) for their in theirs) for layer in layers)
    tips = tuple(
        tuple(
            f"layer {layer} and layer {their} of {base}: {number(v, 3)}" for their, v in zip(theirs, row, strict=True)
        )
        for layer, row in zip(layers, values, strict=True)
    )
    return Panel(
        model,
        place_axis(f"layer of {base}", theirs),
        place_axis("layer", layers),
        (Cells(values, tips, Scale(0.0, 1.0, ("0", "1"), "CKA"), peaks=tuple(_largest(row) for row in values)),),
        label=f"CKA of the layers of {model} and {base}",
    )


def _largest(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda place: (not math.isnan(row[place]), row[place]))


def _check(frame: pl.DataFrame, schema: pl.Schema, argument: str) -> None:
    missing = [column for column in schema if column not in frame.columns]
    if missing or frame.is_empty():
        raise OptionError(
            f"`{argument}` must have rows with the columns {', '.join(schema)}, "
            + (f"but lacks {', '.join(missing)}." if missing else "but got none.")
        )
