from __future__ import annotations

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.charts import Dots, Word
from midlayer_encoders.report.layer_charts import correlation_panels, correlations_chart

ROWS = [
    ("m", "r", "average", "dime", "dcor", 0.5, 0.4, 0.7, None),
    ("m", "r", "A", "dime", "dcor", 0.6, None, None, None),
    ("m", "r", "average", "lidar", "dcor", 0.2, None, None, None),
    ("n", "r", "average", "dime", "dcor", None, None, None, "is constant"),
    ("n", "r", "average", "lidar", "dcor", 0.9, 0.8, 1.0, None),
]
COLUMNS = ["model", "revision", "task", "metric", "statistic", "value", "low", "high", "note"]


def frame() -> pl.DataFrame:
    return pl.DataFrame(ROWS, schema=COLUMNS, orient="row")


def test_models_stand_below_each_other_in_the_row_of_their_metric() -> None:
    (panel,) = correlations_chart(frame(), ["dcor"]).panels
    assert [text for _, text in panel.y.ticks] == ["dime", "lidar"]
    single, first, _, second = (part for part in panel.parts if isinstance(part, Dots))
    assert (single.kind, single.x, single.y) == ("dot", (0.6,), (-0.175,))
    assert (first.label, first.x, first.y) == ("m", (0.5, 0.2), (-0.175, 0.825))
    assert first.spans == ((0.4, 0.7), (0.2, 0.2))  # without an interval the dot is alone
    assert first.tips[0] == "dime, average: 0.500 (0.400 to 0.700)"
    assert (second.label, second.x, second.y) == ("n", (0.9,), (1.175,))
    (word,) = (part for part in panel.parts if isinstance(part, Word))
    assert (word.text, word.x, word.y) == ("undefined", 0, 0.175)
    assert (panel.x.low, panel.x.high) == (0, 1)


def test_a_panel_for_each_model_holds_the_averages_that_are_defined() -> None:
    first, second = correlation_panels(frame(), statistics=["dcor"])
    assert (first.title, second.title) == ("m", "n")
    assert [part.x for part in second.parts if isinstance(part, Dots) and part.kind == "disc"] == [(0.9,)]
    with pytest.raises(OptionError, match="none is defined: is constant"):
        correlation_panels(frame().filter(pl.col("value").is_null()))
