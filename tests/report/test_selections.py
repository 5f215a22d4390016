from __future__ import annotations

import polars as pl

from midlayer_encoders.report.charts import Dots, Mark, Rule, Word
from midlayer_encoders.report.layer_charts import plot_selection, selection_chart
from tests.report.made_frames import metrics_frame, rows_frame, scores_frame


def test_the_choice_is_pointed_out_among_the_rules_and_in_every_panel() -> None:
    frame = pl.concat([metrics_frame(6, names=["lidar", "dime"]), scores_frame(6, tasks=1)])
    choices = {"last": 6, "min-dime": 4, "fixed-depth": 3}
    chart = selection_chart(frame, layer=4, rule="min-dime", choices=choices, num_layers=6)
    top, *panels = chart.panels
    assert top.title == "layer 4, by min-dime"
    assert [text for _, text in top.y.ticks] == list(choices)
    assert [(part.x, part.y) for part in top.parts if isinstance(part, Mark)] == [(4, 1)]
    assert [(part.x, part.y) for part in top.parts if isinstance(part, Dots)] == [((6,), (0,)), ((3,), (2,))]
    assert [(part.text, part.bold) for part in top.parts if isinstance(part, Word)] == [("6", False), ("4", True), ("3", False)]  # fmt: skip
    assert [panel.title for panel in panels] == ["accuracy: LibraryClassification", "lidar", "dime"]
    assert all([part.x for part in panel.parts if isinstance(part, Rule)] == [4] for panel in chart.panels)
    assert list(panels[1].lines[0].y) == frame.filter(name="lidar")["value"].to_list()


def test_without_texts_there_are_the_choices_alone() -> None:
    figure = plot_selection(rows_frame([]), layer=3, rule="last", choices={"last": 3}, num_layers=3)
    assert len(figure.axes) == 1
