"""Figures draw the numbers of their charts."""

from __future__ import annotations

import math
import re
from html import unescape

import numpy as np
import polars as pl
import pytest
from matplotlib.colors import to_hex

from midlayer_encoders.frame import histories, summary
from midlayer_encoders.report.charts import (
    Axis,
    Bars,
    Chart,
    Dots,
    Level,
    Line,
    Mark,
    Panel,
    Part,
    Rule,
    Word,
    layer_axis,
    named_axis,
)
from midlayer_encoders.report.comparison_page import DIFFERENCES, SIMILARITY, differences_chart, similarity_chart
from midlayer_encoders.report.drawing import draw
from midlayer_encoders.report.layer_charts import metrics_chart, selection_chart
from midlayer_encoders.report.pages import figure_html
from midlayer_encoders.report.score_charts import average_panel, losses_panel, tasks_chart
from midlayer_encoders.report.style import LIGHT, SERIES, ordered_colors
from midlayer_encoders.report.training_page import change_chart, curves_chart, heat_chart
from tests.report.made_frames import full_frame, metrics_frame, rows_frame, scores_frame


def history() -> pl.DataFrame:
    return rows_frame(
        [
            ("m", f"step{step}", layer, layer / 3, "metric", "t", name, math.nan if step == layer == 1 else step**0.5 * layer + 1)
            for name in ("lidar", "dime")
            for step in (1, 8, 64)
            for layer in range(4)
        ]
    )  # fmt: skip


def differences() -> pl.DataFrame:
    rows = [
        ("a", model, k, k, k / 3, "t", "lidar", k - s, k - s - 0.5, k - s + 1)
        for s, model in enumerate("bc")
        for k in range(4)
    ]
    return pl.DataFrame(rows, schema=DIFFERENCES, orient="row")


def similarity() -> pl.DataFrame:
    rows = [("a", "b", j, k, 1 / (1 + abs(j - k))) for j in range(3) for k in range(4) if (j, k) != (2, 0)]
    return pl.DataFrame(rows, schema=SIMILARITY, orient="row")


CHARTS = {
    "average": lambda: Chart((average_panel(summary(scores_frame(6)), {}),)),
    "tasks": lambda: tasks_chart(
        summary(scores_frame(6)), {"TF-IDF": {"DocstringSTS": 0.9}, "MiniLM": {"DocstringSTS": 0.8}}
    ),
    "metrics": lambda: metrics_chart(metrics_frame(6, names=["lidar", "dime"], datasets=list("abcdefg")), chosen=3),
    "depths": lambda: metrics_chart(pl.concat([metrics_frame(n, names=["lidar"], model=f"m{n}") for n in (6, 24)])),
    "differences": lambda: differences_chart(differences()),
    "curves": lambda: curves_chart(histories(history())),
    "change": lambda: change_chart(history(), within=0.1),
    "selection": lambda: selection_chart(full_frame(), layer=3, rule="x", choices={"x": 3, "y": 6}, num_layers=30),
}
MAPS = {
    "losses": lambda: Chart((losses_panel(summary(scores_frame(6).slice(1))),)),
    "steps": lambda: heat_chart(histories(history())),
    "similarity": lambda: similarity_chart(similarity()),
}


@pytest.mark.parametrize("name", CHARTS)
def test_curves_have_the_points_and_colors_of_the_chart(name: str) -> None:
    chart = CHARTS[name]()
    figure = draw(chart)
    for panel, axes in zip(chart.panels, figure.axes, strict=False):
        curves = [
            curve
            for curve in axes.lines
            if curve.get_marker() == "o" and curve.get_linestyle() != "None" and len(curve.get_xdata()) > 1
        ]
        for curve, line in zip(curves, panel.lines, strict=True):
            drawn = [(x, y) for x, y in zip(curve.get_xdata(), curve.get_ydata(), strict=True) if math.isfinite(y)]
            assert drawn == [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
            colors = ordered_colors(panel.ordered) if panel.ordered else SERIES
            assert to_hex(curve.get_color()) == colors[line.style % len(colors)]
        assert axes.get_ylim() == (panel.y.low, panel.y.high)


@pytest.mark.parametrize("name", MAPS)
def test_heat_maps_have_the_values_and_rings_of_the_chart(name: str) -> None:
    chart = MAPS[name]()
    figure = draw(chart)
    for panel, axes in zip(chart.panels, figure.axes, strict=False):
        mesh = axes.collections[0]
        values = mesh.get_array()
        assert panel.cells is not None
        np.testing.assert_array_equal(values.filled(math.nan), np.array(panel.cells.values))
        opacity = mesh.to_rgba(values)[..., 3]
        strength = [[panel.cells.scale.strength(value) for value in row] for row in panel.cells.values]
        known = np.isfinite(panel.cells.values)
        np.testing.assert_allclose(opacity[known], 0.06 + 0.94 * np.array(strength)[known], atol=0.02)
        rings = [(ring.get_xdata()[0], ring.get_ydata()[0]) for ring in axes.lines if ring.get_marker() == "o"]
        assert rings == [(column, row) for row, column in enumerate(panel.cells.peaks)]


def every_part() -> Panel:
    parts: tuple[Part, ...] = (
        Rule(1, "chosen"),
        Rule(2),
        Level(2.5, "a level", "level"),
        Bars((0, 2), (1.5, 3.0), 0.0, ("bar 0", "bar 2")),
        Dots((0, 1), (1.0, 2.0), "disc", "discs", 1, ("p", "q"), ((-0.2, 0.4), (0.5, 1.5))),
        Dots((2,), (0.5,), "ring"),
        Dots((3,), (3.5,), "dot"),
        Dots((0.5, 1.5), (3.0, 3.0), "tick", style=2),
        Mark("best", 1, 3.5, "layer 1: 3.5"),
        Mark("last", 3, 1.0, "last: 1.0"),
        Word(1, 0.5, "beside", bold=True),
    )
    return Panel("all", layer_axis(3), Axis("", 0, 4), parts, gain="+2.5")


def test_dots_marks_bars_levels_and_words_are_drawn_where_they_are() -> None:
    panel = every_part()
    axes = draw(Chart((panel,), head=True)).axes[0]
    dots = [line for line in axes.lines if line.get_linestyle() == "None"]
    assert [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in dots[:4]] == [
        [(0, 1.0), (1, 2.0)], [(2, 0.5)], [(3, 3.5)], [(0.5, 3.0), (1.5, 3.0)],
    ]  # fmt: skip
    (spans,) = axes.collections
    assert [[x for x, _ in segment] for segment in spans.get_segments()] == [[-0.2, 0.4], [0.5, 1.5]]
    marks = {(line.get_xdata()[0], line.get_ydata()[0]): to_hex(line.get_color()) for line in dots}
    assert marks[1, 3.5] == LIGHT["best"]
    assert marks[3, 1.0] == LIGHT["page"]
    assert [bar.get_y() + bar.get_height() for bar in axes.patches] == [1.5, 3.0]
    assert [line.get_ydata()[0] for line in axes.lines if line.get_label() == "level"] == [2.5]
    assert {text.get_text() for text in axes.texts} == {"layer 1: 3.5", "last: 1.0", "+2.5", "beside"}


def test_a_logarithmic_axis_and_named_rows() -> None:
    dots = Dots((0.1, 1.0, 100.0), (0, 1, 1))
    panel = Panel("log", Axis("ratio", 0.1, 100, log=True), named_axis(["first\nrow", "second"]), (dots,))
    axes = draw(Chart((panel,))).axes[0]
    assert axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_yticklabels()] == ["first\nrow", "second"]


def test_legends_and_scales_are_in_figures_and_on_pages() -> None:
    chart = metrics_chart(metrics_frame(6, names=["lidar", "dime"], datasets=["a & b", "c"]))
    texts = [text.get_text() for text in draw(chart).legends[0].get_texts()]
    items = re.findall(r"<bdi>(.*?)</bdi></li>", figure_html(chart))
    assert [unescape(item) for item in items] == texts == ["a & b", "c"]
    maps = similarity_chart(similarity())
    assert [axes.get_ylabel() for axes in draw(maps).axes] == ["layer", "CKA"]
    assert figure_html(maps).count('<div class="scale"><span>CKA 0</span>') == 1
    separate = heat_chart(histories(history()))
    assert len(draw(separate).axes) == 4
    assert figure_html(separate).count("(faint) to") == 2


def test_rows_are_named_once_in_a_figure_and_in_every_panel_of_the_page() -> None:
    panel = Panel("p", Axis("", 0, 1), named_axis(["dime", "lidar"]), (Dots((0.5,), (0,)),))
    chart = Chart((panel, panel))
    first, second = (axes.yaxis.get_tick_params()["labelleft"] for axes in draw(chart).axes)
    assert (first, second) == (True, False)
    assert figure_html(chart).count(">dime<") == 2


def test_a_panel_without_parts_is_a_title_alone() -> None:
    axes = draw(Chart((Panel("nothing", layer_axis(2), Axis("", 0, 1), ()),), head=True)).axes[0]
    assert not axes.axison
    assert axes.get_title(loc="left") == "nothing"


def test_names_are_not_parsed_as_formulas() -> None:
    line = Line((0, 1), (0.0, 1.0), "$\\frac$")
    figure = draw(Chart((Panel("$x^2", layer_axis(1), Axis("", 0, 1), (line,)),)))
    figure.draw_without_rendering()
    assert figure.axes[0].get_title(loc="left") == "$x^2"
