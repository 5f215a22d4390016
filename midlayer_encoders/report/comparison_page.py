"""The page and the charts of a comparison: metrics, and differences with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import significant
from midlayer_encoders.report.layer_charts import gap_text, plot_metrics
from midlayer_encoders.report.pages import block, figure_html, layer_table, page_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: A row for each model, metric and pair of equally deep layers: the model minus the base, and the interval.
DIFFERENCES = pl.Schema(
    {"base": pl.String(), "model": pl.String(), "base_layer": pl.Int64(), "layer": pl.Int64()}
    | {"depth": pl.Float64(), "dataset": pl.String(), "name": pl.String()}
    | {column: pl.Float64() for column in ("difference", "low", "high")}
)


def comparisons_html(
    frame: pl.DataFrame, differences: pl.DataFrame, *, how: Mapping[str, str], notes: Sequence[str] = ()
) -> str:
    """Return a self-contained page that compares models with a base.

    Args:
        frame: tidy metrics of every model.
        differences: with the columns of :data:`DIFFERENCES`.
        how: facts about the measurement.
        notes: sentences below the verdict.
    """
    base, models = differences["base"][0], differences["model"].unique(maintain_order=True).to_list()
    metrics = plot_metrics(frame)
    axis = "" if metrics.axes[0].get_xlabel() == "layer" else " The horizontal axis is relative depth in percent."
    over = "" if same_depth(differences) else ", over relative depth in percent"
    sections: dict[str, list[str]] = {
        "Metrics by depth": [
            f"Each metric by layer, on its own scale.{axis}{gap_text(metrics)}",
            figure_html(metrics, meanings=True),
        ],
        "Differences": [
            f"Each model minus {base}{over}. Shaded: the interval over texts. About one in twenty 95 % intervals "
            "misses the true difference, and errors of neighboring layers are correlated.",
            figure_html(plot_differences(differences)),
        ],
        "The numbers": _difference_tables(differences),
        "How it was measured": [block("facts", {"Base": base, "Compared": ", ".join(models), **how})],
    }
    return page_html(f"{' and '.join(models)} against {base}", comparisons_words(differences), sections, notes=notes)


def comparisons_words(differences: pl.DataFrame) -> list[str]:
    """Return a verdict for each model: the number of clear differences.

    Example:
        >>> rows = [("a", "b", k, k, k / 1, "t", "lidar", k, k - 0.5, k + 0.5) for k in (0, 1)]
        >>> comparisons_words(pl.DataFrame(rows, schema=DIFFERENCES, orient="row"))
        ['b differs from a: 1 of 2 differences have an interval that excludes zero.']
    """
    verdicts = []
    for (base, model), rows in differences.group_by("base", "model", maintain_order=True):
        clear = rows.filter((pl.col("low") > 0) | (pl.col("high") < 0))
        differs = "differs from" if len(clear) else "does not clearly differ from"
        verdicts.append(
            f"{model} {differs} {base}: {len(clear)} of {len(rows)} differences have an interval that excludes zero."
        )
    return verdicts


def plot_differences(differences: pl.DataFrame) -> Figure:
    """Return a figure with a panel for each metric: each model minus the base by layer, with shaded intervals.

    Args:
        differences: with the columns of :data:`DIFFERENCES`.

    Example:
        >>> rows = [("a", "b", k, k, k / 2, "t", "lidar", 1.0, 0.5, 1.5) for k in range(3)]
        >>> figure = plot_differences(pl.DataFrame(rows, schema=DIFFERENCES, orient="row"))
        >>> figure.axes[0].get_title(loc="left"), figure.axes[0].lines[1].get_ydata().tolist()
        ('lidar', [1.0, 1.0, 1.0])
    """
    models = differences["model"].unique(maintain_order=True).to_list()
    column = "base_layer" if same_depth(differences) else "depth"
    panels: dict[str, list[drawing.Line]] = {}
    by_depth = differences.sort("depth", maintain_order=True)
    for (name, model), rows in by_depth.group_by("name", "model", maintain_order=True):
        x, y, low, high = (rows[key].to_list() for key in (column, "difference", "low", "high"))
        line = drawing.Line(x, y, f"{model} minus {rows['base'][0]}", models.index(model), (low, high))
        panels.setdefault(str(name), []).append(line)
    num_layers = int(differences["base_layer"].max())  # type: ignore[arg-type]
    return drawing.plot_panels(panels, num_layers, relative=column == "depth", level=0.0)


def same_depth(differences: pl.DataFrame) -> bool:
    """Return True if the compared layers have the same numbers, so that the axis can show layers."""
    return differences.filter(pl.col("base_layer") != pl.col("layer")).is_empty()


def _difference_tables(differences: pl.DataFrame) -> list[str]:
    """Return a table for each model: a column for each metric, with the interval."""
    tables: list[str] = []
    for (model,), model_rows in differences.group_by("model", maintain_order=True):
        columns = {
            str(name): {
                layer: "{} ({} to {})".format(*(significant(value, 3, sign=True) for value in values))
                for layer, *values in rows.select("layer", "difference", "low", "high").iter_rows()
            }
            for (name,), rows in model_rows.group_by("name", maintain_order=True)
        }
        caption = f"{model} minus {model_rows['base'][0]} by layer, and the interval"
        tables.append(layer_table(caption, columns, width=3))
    return tables
