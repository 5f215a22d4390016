"""The page of models side by side: curves, differences with intervals, and how alike their layers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from midlayer_encoders.frame import Series
from midlayer_encoders.report.axes import DEPTH
from midlayer_encoders.report.comparisons import differences_chart, same_depth, similarity_chart
from midlayer_encoders.report.metrics import broken_words, metrics_chart
from midlayer_encoders.report.page import document, facts, large, section, soft
from midlayer_encoders.report.page_figures import figure_html
from midlayer_encoders.report.tables import metric_tables

__all__ = ["comparisons_html", "comparisons_words"]

_CKA_WORDS = (
    "Linear CKA, without bias, of each layer (upward) with each layer of {} (to the right), on the same texts. The "
    "most alike is outlined. A model that was not changed has 1 on the diagonal."
)


def comparisons_html(
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
        differences: with the columns of :data:`~midlayer_encoders.report.comparisons.DIFFERENCES`.
        similarity: with the columns of :data:`~midlayer_encoders.report.comparisons.SIMILARITY`.
        how: what was measured and with what.
        notes: sentences to print below the verdict.
    """
    base, models = differences["base"][0], differences["model"].unique(maintain_order=True).to_list()
    sections = [
        section("Metrics by depth", _curves(frame)),
        section("Differences", soft(_difference_words(differences)) + figure_html(differences_chart(differences))),
        section("How alike the layers are", soft(_CKA_WORDS.format(base)) + figure_html(similarity_chart(similarity))),
        section("The numbers", _tables(differences)),
        section("How it was measured", facts({"Base": base, "Compared": ", ".join(models), **how})),
    ]
    lead = "".join(large(words) for words in comparisons_words(differences, similarity))
    return document(f"{' and '.join(models)} against {base}", lead, sections, notes=notes)


def comparisons_words(differences: pl.DataFrame, similarity: pl.DataFrame) -> list[str]:
    """Return a few words for each model: how many differences are clear, and where it is least like the base.

    Example:
        >>> from midlayer_encoders.report.comparisons import DIFFERENCES, SIMILARITY
        >>> rows = [("a", "b", k, k, k / 1, "t", "lidar", k, k - 0.5, k + 0.5) for k in (0, 1)]
        >>> alike = [("a", "b", j, k, 0.9 if j == k else 0.1) for j in (0, 1) for k in (0, 1)]
        >>> frames = [pl.DataFrame(rows, schema=DIFFERENCES, orient="row")]
        >>> frames.append(pl.DataFrame(alike, schema=SIMILARITY, orient="row"))
        >>> (said,) = comparisons_words(*frames)
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


def _curves(frame: pl.DataFrame) -> str:
    chart = metrics_chart(frame)
    relative = " Layers stand at their relative depth, in percent." if chart.panels[0].x == DEPTH else ""
    return soft(f"Each metric by layer, on its own scale.{relative}{broken_words(chart)}") + figure_html(chart)


def _difference_words(differences: pl.DataFrame) -> str:
    over = "" if same_depth(differences) else ", over relative depth in percent"
    return (
        f"Each model minus {differences['base'][0]}{over}. Shaded: the interval over texts. Of good intervals at 95 % "
        "one in twenty still misses, and neighboring layers err alike."
    )


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
