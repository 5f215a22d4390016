"""The page of models side by side: curves, differences with intervals, and how alike their layers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np
import polars as pl
from numpy.typing import NDArray

from midlayer_encoders.frame import Series, check_frame, metric_series
from midlayer_encoders.report.cells import cell_map, cell_scale
from midlayer_encoders.report.page import document, facts, section, sentences
from midlayer_encoders.report.pairs import same_depth, similarity_matrix
from midlayer_encoders.report.panels import legend_list, metric_panels, panel_grid
from midlayer_encoders.report.svg import PANEL, Level, Line, chart
from midlayer_encoders.report.tables import breakable, metric_tables
from midlayer_encoders.report.ticks import layer_ticks

__all__ = ["pairs_html", "pairs_words"]

_PERCENT = 100  # relative depth stands on an axis of whole numbers


def pairs_html(
    frame: pl.DataFrame,
    differences: pl.DataFrame,
    similarity: pl.DataFrame,
    *,
    how: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """Return one self-contained page that compares models with a base.

    Args:
        frame: tidy, the metrics of every model.
        differences: with the columns of :data:`~midlayer_encoders.report.pairs.DIFFERENCES`.
        similarity: with the columns of :data:`~midlayer_encoders.report.pairs.SIMILARITY`.
        how: what was measured and with what.
        notes: sentences to print below the verdict.
    """
    base, models = differences["base"][0], differences["model"].unique(maintain_order=True).to_list()
    title = f"{' and '.join(models)} against {base}"
    by_layer = same_depth(differences)
    sections = [
        section("Metrics by depth", _curves(check_frame(frame), by_layer=by_layer)),
        section("Differences", _differences(differences, models, by_layer=by_layer)),
        section("How alike the layers are", _similarities(similarity, models)),
        section("The numbers", _tables(differences)),
        section("How it was measured", facts({"Base": base, "Compared": ", ".join(models), **how})),
    ]
    header = (
        f"<header><h1>{escape(title)}</h1>"
        + "".join(f'<p class="verdict">{escape(said)}</p>' for said in pairs_words(differences, similarity))
        + f"{sentences(notes)}</header>"
    )
    return document(title, f"{header}<main>{''.join(sections)}</main>")


def pairs_words(differences: pl.DataFrame, similarity: pl.DataFrame) -> list[str]:
    """Return a few words for each model: how many differences are clear, and where it is least like the base.

    Example:
        >>> from midlayer_encoders.report.pairs import DIFFERENCES, SIMILARITY
        >>> rows = [("a", "b", k, k, k / 1, "t", "lidar", k, k - 0.5, k + 0.5) for k in (0, 1)]
        >>> alike = [("a", "b", j, k, 0.9 if j == k else 0.1) for j in (0, 1) for k in (0, 1)]
        >>> frames = [pl.DataFrame(rows, schema=DIFFERENCES, orient="row")]
        >>> frames.append(pl.DataFrame(alike, schema=SIMILARITY, orient="row"))
        >>> (said,) = pairs_words(*frames)
        >>> said.split(". ")[0]
        'b differs from a: 1 of 2 differences have an interval without zero'
        >>> said.split(". ")[1]
        "Its layers are least like a's at layer 0 (CKA 0.90 with the layer as deep), and alike by 0.90 on average."
    """
    words = []
    for (base, model), mine in differences.group_by("base", "model", maintain_order=True):
        clear = mine.filter((pl.col("low") > 0) | (pl.col("high") < 0))
        differs = "differs from" if len(clear) else "does not clearly differ from"
        said = f"{model} {differs} {base}: {len(clear)} of {len(mine)} differences have an interval without zero."
        pairs = mine.select("base_layer", "layer").unique()
        alike = similarity.filter(pl.col("model") == model).join(pairs, on=["base_layer", "layer"]).sort("layer")
        least = alike.sort("cka", maintain_order=True).row(0, named=True)
        mean = float(alike["cka"].to_numpy().mean())
        words.append(
            f"{said} Its layers are least like {base}'s at layer {least['layer']} (CKA {least['cka']:.2f} with the "
            f"layer as deep), and alike by {mean:.2f} on average."
        )
    return words


def _curves(frame: pl.DataFrame, *, by_layer: bool) -> str:
    deepest = int(frame["layer"].max()) if by_layer else _PERCENT  # type: ignore[arg-type]
    metrics = metric_series(frame)
    if by_layer:
        return metric_panels(metrics, deepest, rule=None)
    percent = {name: [_in_percent(series) for series in many] for name, many in metrics.items()}
    return '<p class="soft">Layers stand at their relative depth, in percent.</p>' + metric_panels(
        percent, deepest, rule=None
    )


def _in_percent(series: Series) -> Series:
    layers = tuple(round(_PERCENT * depth) for depth in series.depths)
    return Series(series.label, layers, series.depths, series.values)


def _differences(differences: pl.DataFrame, models: Sequence[str], *, by_layer: bool) -> str:
    base = differences["base"][0]
    deepest = int(differences["base_layer"].max()) if by_layer else _PERCENT  # type: ignore[arg-type]
    panels = []
    for name in differences["name"].unique(maintain_order=True):
        lines = [
            _line(differences.filter((pl.col("name") == name) & (pl.col("model") == model)), place, by_layer=by_layer)
            for place, model in enumerate(models)
        ]
        drawn = chart(
            lines, deepest, size=PANEL, label=f"{name}: difference by layer", level=Level(0.0, "no difference")
        )
        panels.append(f"<figure><figcaption><h3>{breakable(name)}</h3></figcaption>{drawn}</figure>")
    words = (
        f"Each model minus {escape(base)}{'' if by_layer else ', over relative depth in percent'}. Shaded: the "
        "interval over texts. Of good intervals at 95 % one in twenty still misses, and neighbouring layers err alike."
    )
    legend = legend_list({f"{model} minus {base}": place for place, model in enumerate(models)})
    return f'<p class="soft">{words}</p>{legend}{panel_grid(panels)}'


def _line(mine: pl.DataFrame, place: int, *, by_layer: bool) -> Line:
    mine = mine.sort("depth")
    along = mine["base_layer"] if by_layer else (mine["depth"] * _PERCENT).round().cast(pl.Int64)
    ends = list(zip(mine["low"], mine["high"], strict=True))
    tips = [
        f"layer {layer}: {value:+.3g} ({low:+.3g} to {high:+.3g})"
        for layer, value, (low, high) in zip(mine["layer"], mine["difference"], ends, strict=True)
    ]
    return Line(list(zip(along, mine["difference"], strict=True)), tips, place, band=ends)


def _similarities(similarity: pl.DataFrame, models: Sequence[str]) -> str:
    base = similarity["base"][0]
    panels = []
    for model in models:
        values, layers, theirs = similarity_matrix(similarity.filter(pl.col("model") == model))
        drawn = cell_map(
            values,
            rows=_some(layers),
            columns=_some(theirs),
            tip=_tip(values, layers, theirs, base),
            label=f"CKA of the layers of {model} and {base}",
            low=0.0,
            high=1.0,
        )
        panels.append(f"<figure><figcaption><h3>{breakable(model)}</h3></figcaption>{drawn}</figure>")
    words = (
        f"Linear CKA, without bias, of each layer (upward) with each layer of {escape(base)} (to the right), on the "
        "same texts. A model that was not changed has 1 on the diagonal."
    )
    return f'<p class="soft">{words}</p>{cell_scale("0", "1")}{panel_grid(panels)}'


def _some(layers: Sequence[int]) -> list[str]:
    shown = set(layer_ticks(layers[-1], 6))
    return [str(layer) if layer in shown else "" for layer in layers]


def _tip(
    values: NDArray[np.float64], layers: Sequence[int], theirs: Sequence[int], base: str
) -> Callable[[int, int], str]:
    """Return what says the text of a cell of the map."""
    return lambda row, column: f"layer {layers[row]} and layer {theirs[column]} of {base}: {values[row, column]:.3f}"


def _tables(differences: pl.DataFrame) -> str:
    several = differences["model"].n_unique() > 1
    tables = []
    for (model,), mine in differences.group_by("model", maintain_order=True):
        names = mine["name"].unique(maintain_order=True).to_list()
        for start in range(0, len(names), 2):  # two with their intervals are what a page of paper holds
            shown = {
                name: [_series(word, column, mine.filter(pl.col("name") == name)) for word, column in _COLUMNS]
                for name in names[start : start + 2]
            }
            who = model if several else "Differences"
            tables.append(metric_tables(shown, caption=f"{who} by layer: minus {mine['base'][0]}, and its interval"))
    return "".join(tables)


_COLUMNS = (("", "difference"), ("from", "low"), ("to", "high"))


def _series(word: str, column: str, rows: pl.DataFrame) -> Series:
    rows = rows.sort("layer")
    return Series(word, tuple(rows["layer"]), tuple(rows["depth"]), tuple(rows[column]))
