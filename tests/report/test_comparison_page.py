from __future__ import annotations

import polars as pl

from midlayer_encoders.report.charts import DEPTH, Level
from midlayer_encoders.report.comparison_page import DIFFERENCES, SIMILARITY, differences_chart, similarity_chart


def differences(layer_of: dict[int, int]) -> pl.DataFrame:
    rows = [
        ("a", model, base, layer, base / 2, "t", name, base + shift, base + shift - 1, base + shift + 2)
        for name in ("lidar", "dime")
        for shift, model in ((0.0, "b"), (10.0, "c"))
        for base, layer in layer_of.items()
    ]
    return pl.DataFrame(rows, schema=DIFFERENCES, orient="row")


def test_differences_are_in_the_order_of_depth_whatever_the_order_of_rows() -> None:
    chart = differences_chart(differences({2: 2, 0: 0, 1: 1}))
    assert [panel.title for panel in chart.panels] == ["lidar", "dime"]
    for panel in chart.panels:
        assert [(line.x, line.y) for line in panel.lines] == [((0, 1, 2), (0, 1, 2)), ((0, 1, 2), (10, 11, 12))]
        assert panel.lines[1].band == ((9, 12), (10, 13), (11, 14))
        assert panel.lines[0].tips[1] == "layer 1: +1 (+0 to +3)"
        assert [part.value for part in panel.parts if isinstance(part, Level)] == [0]
        assert panel.y.low < -1 < 14 < panel.y.high
    assert list(chart.key) == ["b minus a", "c minus a"]


def test_models_of_another_depth_are_compared_over_relative_depth() -> None:
    panel = differences_chart(differences({0: 0, 1: 2, 2: 4})).panels[0]
    assert panel.x == DEPTH
    assert panel.lines[0].x == (0, 0.5, 1)
    assert panel.lines[0].tips[2].startswith("layer 4: ")


def test_the_most_alike_layer_of_each_row_is_pointed_out() -> None:
    table = {0: (0.9, 0.2, 0.1), 4: (0.1, 0.3, 0.8), 8: (0.2, 0.7, None)}
    rows = [("a", "b", 3 * k, layer, v) for layer, row in table.items() for k, v in enumerate(row) if v is not None]
    (panel,) = similarity_chart(pl.DataFrame(rows, schema=SIMILARITY, orient="row")).panels
    assert panel.cells is not None
    assert panel.cells.peaks == (0, 2, 1)
    assert panel.cells.values[1] == (0.1, 0.3, 0.8)
    assert panel.cells.tips[1][2] == "layer 4 and layer 6 of a: 0.800"
    assert [text for _, text in panel.x.ticks] == ["0", "3", "6"]
    assert [text for _, text in panel.y.ticks] == ["0", "4", "8"]
