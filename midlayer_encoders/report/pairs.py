"""Figures of models side by side: differences with intervals, and how alike their layers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.axes import INK, MISSING, SOFT, columns_for, grid, layer_axis
from midlayer_encoders.report.style import SERIES
from midlayer_encoders.report.ticks import layer_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DIFFERENCES", "SIMILARITY", "plot_differences", "plot_similarity", "same_depth", "similarity_matrix"]

_PAIR = {"base": pl.String(), "model": pl.String(), "base_layer": pl.Int64(), "layer": pl.Int64()}

DIFFERENCES = pl.Schema(
    _PAIR
    | {
        "depth": pl.Float64(),
        "dataset": pl.String(),
        "name": pl.String(),
        "difference": pl.Float64(),
        "low": pl.Float64(),
        "high": pl.Float64(),
    }
)
"""A row for each model, metric and pair of equally deep layers: the model minus the base, and its interval."""

SIMILARITY = pl.Schema(_PAIR | {"cka": pl.Float64()})
"""A row for each model, layer of it and layer of the base."""


def same_depth(differences: pl.DataFrame) -> bool:
    """Return whether the layers compared have the same number, so that layers can stand on an axis."""
    return differences.filter(pl.col("base_layer") != pl.col("layer")).is_empty()


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
    _check(differences, DIFFERENCES, "differences")
    names = differences["name"].unique(maintain_order=True).to_list()
    models = differences["model"].unique(maintain_order=True).to_list()
    by_layer = same_depth(differences)
    figure, panels = grid(len(names), columns=columns_for(len(names)), legend=len(models))
    for axes, name in zip(panels, names, strict=True):
        axes.axhline(0, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
        for place, model in enumerate(models):
            mine = differences.filter((pl.col("name") == name) & (pl.col("model") == model)).sort("depth")
            _draw_band(axes, mine, "base_layer" if by_layer else "depth", place, model)
        axes.set_title(name, loc="left", fontsize=10)
        deepest = int(differences["base_layer"].max())  # type: ignore[arg-type]
        layer_axis(axes, deepest, relative=not by_layer)
    handles, labels = panels[0].get_legend_handles_labels()
    base = differences["base"][0]
    figure.legend(
        handles, [f"{label} minus {base}" for label in labels], loc="outside upper left", frameon=False, fontsize=9
    )
    return figure


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
    from matplotlib.figure import Figure

    _check(similarity, SIMILARITY, "similarity")
    models = similarity["model"].unique(maintain_order=True).to_list()
    columns = min(len(models), 3)
    rows = -(-len(models) // columns)
    figure = Figure(figsize=(max(3.6 * columns + 0.8, 5.0), 3.5 * rows + 0.2), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    for axes, model in zip(panels, models, strict=False):
        values, layers, theirs = similarity_matrix(similarity.filter(pl.col("model") == model))
        axes.set_facecolor(MISSING)
        image = axes.imshow(values, cmap="Blues", vmin=0, vmax=1, origin="lower", aspect="auto")
        axes.scatter(values.argmax(axis=1), range(len(layers)), s=22, facecolors="none", edgecolors="#d55e00")
        _ticks(axes, theirs, layers)
        axes.set_xlabel(f"layer of {similarity['base'][0]}", fontsize=8, color=SOFT)
        axes.set_ylabel("layer", fontsize=8, color=SOFT)
        axes.set_title(model, loc="left", fontsize=10)
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=8, colors=SOFT)
    bar = figure.colorbar(image, ax=list(panels), pad=0.02, aspect=30)
    bar.set_label("CKA", fontsize=8, color=SOFT)
    bar.ax.tick_params(labelsize=8, colors=SOFT)
    return figure


def similarity_matrix(similarity: pl.DataFrame) -> tuple[NDArray[np.float64], list[int], list[int]]:
    """Return one model's CKA with the base, ``(L, L')``, its layers, and the base's."""
    layers = sorted(similarity["layer"].unique().to_list())
    theirs = sorted(similarity["base_layer"].unique().to_list())
    values = np.full((len(layers), len(theirs)), np.nan)
    for layer, base_layer, value in similarity.select("layer", "base_layer", "cka").iter_rows():
        values[layers.index(layer), theirs.index(base_layer)] = value
    return values, layers, theirs


def _draw_band(axes: Axes, mine: pl.DataFrame, along: str, place: int, label: str) -> None:
    colour = SERIES[place % len(SERIES)]
    axes.fill_between(mine[along], mine["low"], mine["high"], color=colour, alpha=0.22, linewidth=0)
    axes.plot(mine[along], mine["difference"], color=colour, linewidth=1.6, marker="o", markersize=2.5, label=label)


def _ticks(axes: Axes, across: list[int], up: list[int]) -> None:
    for layers, put in ((across, axes.set_xticks), (up, axes.set_yticks)):
        shown = [place for place, layer in enumerate(layers) if layer in layer_ticks(layers[-1], 7)]
        put(shown, [str(layers[place]) for place in shown])


def _check(frame: pl.DataFrame, schema: pl.Schema, argument: str) -> None:
    missing = [column for column in schema if column not in frame.columns]
    if missing or frame.is_empty():
        raise OptionError(
            f"`{argument}` must have rows with the columns {', '.join(schema)}, "
            + (f"but lacks {', '.join(missing)}." if missing else "but got none.")
        )
