"""Coordinates of known curves in the figures of pages."""

import re

import polars as pl
import pytest
from matplotlib.colors import to_hex

from benchmarks.paper.charts import LabeledCurve, plot_curves
from benchmarks.paper.reproduce import TEMPLATE
from midlayer_encoders.report import report_html
from midlayer_encoders.report.comparison_page import DIFFERENCES, comparisons_html, plot_differences
from midlayer_encoders.report.layer_charts import plot_selection
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.style import SERIES
from midlayer_encoders.report.training_page import steps_html
from tests.report.drawn_artists import points
from tests.report.made_frames import metrics_frame, rows_frame

CURVE = [(0, 31.0), (3, 52.5), (6, 40.0), (12, 47.25), (24, 36.0)]


def test_page_has_a_chart_for_scores_and_metrics_and_the_rule_of_the_best() -> None:
    rows = [("m", "main", k, k / 24, "score", "STS", "accuracy", v / 100) for k, v in CURVE]
    frame = pl.concat([rows_frame(rows), metrics_frame(24, names=["lidar"], model="m")[5:]])
    page = report_html(frame, title="T", how={}, baselines={"TF-IDF": {"STS": 0.44}})
    alts = re.findall('<img class="chart" alt="(.*?)"', page)
    assert [alt.partition(":")[0] for alt in alts] == ["STS", "lidar"]
    assert "The upright line is layer 3, the best by score." in page


# --- comparisons --------------------------------------------------------------------------------------------------------

ROWS = [
    ("a", model, k, k, k / 4, "t", name, value, value - 0.5, value + 1.0)
    for number, model in enumerate(("b", "c"))
    for name in ("lidar", "dime")
    for k, value in ((0, 1.0 + number), (2, -3.0), (4, 2.0 if name == "dime" else -0.25))
]


def test_differences_are_at_their_coordinates() -> None:
    differences = pl.DataFrame(ROWS, schema=DIFFERENCES, orient="row")
    for axes, name in zip(plot_differences(differences).axes, ("lidar", "dime"), strict=True):
        for line, model in zip(axes.lines[1:], "bc", strict=True):
            model_rows = [row for row in ROWS if row[1] == model and row[6] == name]
            assert list(line.get_xdata()) == [row[2] for row in model_rows]
            assert list(line.get_ydata()) == [row[7] for row in model_rows]
        for band, model in zip(axes.collections, "bc", strict=True):
            corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
            assert {
                (row[2], row[column]) for row in ROWS if row[1] == model and row[6] == name for column in (8, 9)
            } <= corners
    page = comparisons_html(metrics_frame(4, names=["lidar"], model="a"), differences, how={})
    assert "b differs from a: 5 of 6 differences have an interval that excludes zero." in page
    table = re.search(r"<caption>b minus a by layer, and the interval</caption>.*?</table>", page)
    assert table is not None
    assert re.findall(r"<td>(.*?)</td>", table[0])[:2] == ["+1 (+0.5 to +2)"] * 2


# --- a training history ---------------------------------------------------------------------------------------------------


def test_history_is_at_its_coordinates() -> None:
    values = {1: [0.0, 8.0, 4.0], 4: [2.0, 10.0, 4.0], 16: [3.0, 2.0, 4.5]}
    rows = [
        ("m", f"step{step}", layer, layer / 4, "metric", "t", "dime", value)
        for step, layer_values in values.items()
        for layer, value in zip((0, 2, 4), layer_values, strict=True)
    ]
    frame = rows_frame(rows)
    changes = [
        100 * (abs(a[k] - b[k]) + abs(b[k] - c[k])) / 2 / 10 for a, b, c in [tuple(values.values())] for k in range(3)
    ]
    page = steps_html(frame, title="T", how={})
    table = re.search(r"<caption>Mean change between successive steps.*?</table>", page)
    assert table is not None
    assert [float(cell) for cell in re.findall(r"<td>(.*?)</td>", table[0])] == pytest.approx(changes, abs=0.05)
    # Within a tenth of the range, 1.0: layer 0 from step 4 on, layer 2 at the end only, layer 4 from the start.
    table = re.search(r"<caption>The step from which each layer is settled</caption>.*?</table>", page)
    assert table is not None
    assert re.findall(r"<td>(.*?)</td>", table[0]) == ["4", "16", "1"]


# --- selections, experiments -----------------------------------------------------------------------------------------


def test_selections_are_at_their_coordinates() -> None:
    rows = [("m", "r", k, k / 4, kind, f"on {kind}", name, value) for kind, name in (("metric", "dime"), ("score", "acc"))
            for k, value in ((4, 0.3), (0, 0.1), (2, 0.2))]  # fmt: skip
    figure = plot_selection(rows_frame(rows), layer=2, rule="auto", choices={"last": 4, "auto": 2}, num_layers=4)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["layer 2, by auto", "acc: on score", "dime"]
    top, *panels = figure.axes
    (rule,) = top.lines
    assert list(rule.get_xdata()) == [2, 2]
    assert [(bar.get_width(), bar.get_y() + bar.get_height() / 2) for bar in top.patches] == [(4, 0), (2, 1)]
    assert [text.get_text() for text in top.get_yticklabels()] == ["last", "auto"]
    for panel in panels:
        line, rule = panel.lines
        assert list(rule.get_xdata()) == [2, 2]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2, 4], [0.1, 0.2, 0.3])


def test_experiment_curves_have_their_own_colors_and_coordinates() -> None:
    lines = [
        LabeledCurve("p", (0, 2, 4), (1.0, 3.0, 2.0), band=((0.5, 2.5, 1.5), (1.5, 3.5, 2.5))),
        LabeledCurve("q", (0, 3), (2.0, 1.0)),
    ]
    figure = plot_curves({"first": lines, "second": lines[1:]}, "layer")
    for axes, panel_lines in zip(figure.axes, (lines, lines[1:]), strict=True):
        for drawn, line in zip(axes.lines, panel_lines, strict=True):
            assert to_hex(drawn.get_color()) == SERIES["pq".index(line.label)]
            assert points(drawn) == list(zip(line.x, line.y, strict=True))
    section = {"name": "fig6", "title": "x", "claim": "claim", "findings": [], "table": [["a"]], "figure": figure}
    page = render(TEMPLATE, sections=[section], title="T", how={}, notes=[])
    assert '<img class="chart" alt="first; second"' in page
