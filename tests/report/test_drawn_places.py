"""What stands on an axis stands at the right place: coordinates of known curves in the page's pictures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest

from midlayer_encoders.report import report_html
from midlayer_encoders.report.axes import layer_axis, place_axis
from midlayer_encoders.report.charts import Cells, Level, Line, Mark, Panel, Part, Rule, Scale, value_axis
from midlayer_encoders.report.comparisons import DIFFERENCES, SIMILARITY, plot_differences, plot_similarity
from midlayer_encoders.report.comparisons_page import comparisons_html
from midlayer_encoders.report.experiments import curves_panel
from midlayer_encoders.report.experiments_page import Finding, experiments_html
from midlayer_encoders.report.probes import plot_probes
from midlayer_encoders.report.selections import plot_selection
from midlayer_encoders.report.steps import plot_steps_change, plot_steps_heat
from midlayer_encoders.report.steps_page import steps_html
from midlayer_encoders.report.svg import MAP, PANEL, WIDE, Size, panel_svg
from tests.report.made_frames import metrics_frame, rows_frame

FLOOR = 24  # below the axis


def pictures(page: str, label: str) -> list[ElementTree.Element]:
    found = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)]
    return [one for one in found if label in (one.get("aria-label") or "")]


class Axes:
    """Reads values back from a picture, by its ticks alone."""

    def __init__(self, picture: ElementTree.Element) -> None:
        ticks = [one for one in picture.iter("text") if one.get("class") == "tick" and one.text != "layer"]
        below = [one for one in ticks if one.get("text-anchor") == "middle"]
        beside = [one for one in ticks if one.get("text-anchor") == "end"]
        self._x = np.polyfit([float(one.attrib["x"]) for one in below], [self._number(one) for one in below], 1)
        self._y = np.polyfit([float(one.attrib["y"]) - 4 for one in beside], [self._number(one) for one in beside], 1)

    @staticmethod
    def _number(tick: ElementTree.Element) -> float:
        return float((tick.text or "").replace("−", "-"))

    def at(self, x: float | str, y: float | str) -> tuple[float, float]:
        return float(np.polyval(self._x, float(x))), float(np.polyval(self._y, float(y)))


def near(points: list[tuple[float, float]], expected: list[tuple[float, float]], *, x: float, y: float) -> None:
    found, wanted = np.array(points), np.array(expected)
    assert found.shape == wanted.shape
    assert np.abs(found[:, 0] - wanted[:, 0]).max() < x
    assert np.abs(found[:, 1] - wanted[:, 1]).max() < y


CURVE = [(0, 31.0), (3, 52.5), (6, 40.0), (12, 47.25), (24, 36.0)]


@pytest.mark.parametrize("size", [WIDE, PANEL])
def test_points_marks_level_and_rule_are_read_back_from_the_ticks(size: Size) -> None:
    layers, values = zip(*CURVE, strict=True)
    parts: tuple[Part, ...] = (
        Rule(12, "chosen"),
        Level(44.0, "base"),
        Line(layers, values, band=tuple((v - 2, v + 3) for v in values)),
        Mark("last", 24, 36.0, "last"),
        Mark("best", 3, 52.5, "best"),
    )
    text = panel_svg(Panel("x", layer_axis(24), value_axis(parts), parts, gain="+16.5"), size)
    picture = ElementTree.fromstring(text)
    axes = Axes(picture)
    (group,) = (one for one in picture.iter("g") if "line" in (one.get("class") or ""))
    close = {"x": 0.05, "y": 0.2 if size is WIDE else 0.4}
    near([axes.at(dot.attrib["cx"], dot.attrib["cy"]) for dot in group.iter("circle")], CURVE, **close)
    for dot in group.iter("circle"):
        assert size.left <= float(dot.attrib["cx"]) <= size.width - size.right
        assert size.top <= float(dot.attrib["cy"]) <= size.height - FLOOR
    assert axes.at(size.width - size.right, 0)[0] == pytest.approx(24, abs=0.05)
    band, path = group.findall("path")
    near([axes.at(*pair) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.attrib["d"])], CURVE, **close)
    corners = [axes.at(*pair) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", band.attrib["d"])]
    near(corners, [(k, v + 3) for k, v in CURVE] + [(k, v - 2) for k, v in reversed(CURVE)], **close)
    shapes = {one.get("class"): one for one in picture.iter() if one.get("class") in ("best", "last", "level", "rule")}
    near([axes.at(shapes["best"].attrib["cx"], shapes["best"].attrib["cy"])], [(3, 52.5)], **close)
    side = float(shapes["last"].attrib["width"]) / 2
    square = axes.at(float(shapes["last"].attrib["x"]) + side, float(shapes["last"].attrib["y"]) + side)
    near([square], [(24, 36.0)], **close)
    start, height, end = re.findall(r"[\d.]+", shapes["level"].attrib["d"])
    near([axes.at(start, height), axes.at(end, height)], [(0, 44.0), (24, 44.0)], **close)
    across = re.findall(r"[\d.]+", shapes["rule"].attrib["d"])
    assert axes.at(across[0], 0)[0] == pytest.approx(12, abs=0.05)
    assert float(across[2]) == size.height - FLOOR


def test_the_pages_curve_of_some_layers_stands_at_those_layers() -> None:
    """Layers 0, 3, 6, 12 and 24 of 24 are not evenly spaced; the best layer's rule goes through the metrics."""
    rows = [("m", "main", k, k / 24, "score", "STS", "accuracy", v / 100) for k, v in CURVE]
    frame = pl.concat([rows_frame(rows), metrics_frame(24, names=["lidar"], model="m")[5:]])
    page = report_html(frame, title="T", how={}, baselines={"TF-IDF": {"STS": 0.44}})
    for picture in pictures(page, "STS by layer"):
        axes = Axes(picture)
        (group,) = (one for one in picture.iter("g") if "line" in (one.get("class") or ""))
        near([axes.at(dot.attrib["cx"], dot.attrib["cy"]) for dot in group.iter("circle")], CURVE, x=0.1, y=0.2)
    assert len(pictures(page, "STS by layer")) == 2
    values = list(frame.filter(pl.col("name") == "lidar").select("layer", "value").iter_rows())
    for picture in pictures(page, "lidar by layer"):
        axes = Axes(picture)
        near([axes.at(dot.attrib["cx"], dot.attrib["cy"]) for dot in picture.iter("circle")], values, x=0.1, y=0.2)
        (rule,) = (one for one in picture.iter("path") if one.get("class") == "rule")
        assert axes.at(re.findall(r"[\d.]+", rule.attrib["d"])[0], 0)[0] == pytest.approx(3, abs=0.1)
    assert len(pictures(page, "lidar by layer")) == 2  # one for the desk, one for phones
    assert "The upright line is layer 3, the best by score." in page


def test_cells_of_a_map_stand_by_row_and_column_and_grow_stronger() -> None:
    values = np.array([[0.0, 0.25, 0.5], [0.75, 1.0, np.nan]])
    tips = tuple(tuple(f"{row} {column}" for column in range(3)) for row in range(2))
    cells = Cells(tuple(map(tuple, values.tolist())), tips, Scale(0, 1, ("0", "1")))
    panel = Panel("m", place_axis("", ["c0", "c1", "c2"]), place_axis("", ["r0", "r1"]), (cells,))
    picture = ElementTree.fromstring(panel_svg(panel, MAP))
    words = {one.text: (float(one.attrib["x"]), float(one.attrib["y"])) for one in picture.iter("text")}
    for cell in picture.iter("rect"):
        row, column = map(int, (cell.findtext("title") or "").split())
        x, y, wide, tall = (float(cell.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x + wide / 2 == pytest.approx(words[f"c{column}"][0], abs=0.1)
        assert y + tall / 2 == pytest.approx(words[f"r{row}"][1] - 4, abs=0.1)
        assert float(cell.attrib["fill-opacity"]) == pytest.approx(0.06 + 0.94 * values[row, column], abs=0.006)
    (gap,) = (one for one in picture.iter("path") if one.get("class") == "gap")
    assert gap.findtext("title") == "1 2"
    assert words["r1"][1] < words["r0"][1]  # the first row is at the bottom


# --- models side by side ------------------------------------------------------------------------------------------------

ROWS = [
    ("a", model, k, k, k / 4, "t", name, value, value - 0.5, value + 1.0)
    for number, model in enumerate(("b", "c"))
    for name in ("lidar", "dime")
    for k, value in ((0, 1.0 + number), (2, -3.0), (4, 2.0 if name == "dime" else -0.25))
]
CKA = {
    "b": [[0.9, 0.95, 0.2], [0.125, 0.8, 0.7], [0.3, 0.6, 0.5]],
    "c": [[0.1, 0.2, 0.3], [0.6, 0.5, 0.4], [0.7, 0.9, 0.8]],
}
"""By base layer, then layer: neither symmetric, nor with its peaks on the diagonal."""

ALIKE = [("a", m, 2 * j, 2 * k, v) for m, rows in CKA.items() for j, row in enumerate(rows) for k, v in enumerate(row)]


def test_differences_and_similarities_are_drawn_where_they_are() -> None:
    differences = pl.DataFrame(ROWS, schema=DIFFERENCES, orient="row")
    similarity = pl.DataFrame(ALIKE, schema=SIMILARITY, orient="row")
    for axes, name in zip(plot_differences(differences).axes, ("lidar", "dime"), strict=True):
        for line, model in zip(axes.lines[1:], "bc", strict=True):
            mine = [row for row in ROWS if row[1] == model and row[6] == name]
            assert list(line.get_xdata()) == [row[2] for row in mine]
            assert list(line.get_ydata()) == [row[7] for row in mine]
        for band, model in zip(axes.collections, "bc", strict=True):
            corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
            assert {(row[2], row[at]) for row in ROWS if row[1] == model and row[6] == name for at in (8, 9)} <= corners
    figure = plot_similarity(similarity)
    for axes, model in zip(figure.axes, "bc", strict=False):
        cka = np.array(CKA[model])
        values = axes.images[0].get_array()
        assert values is not None
        assert values.tolist() == cka.T.tolist()  # its own layers upward, the base's to the right
        rings = axes.collections[0].get_offsets().tolist()
        assert rings == [[int(cka[:, k].argmax()), k] for k in range(3)]
    page = comparisons_html(metrics_frame(4, names=["lidar"], model="a"), differences, similarity, how={})
    (drawn,) = pictures(page, "CKA of the layers of b and a")
    tips = [cell.findtext("title") for cell in drawn.iter("rect")]
    assert "layer 2 and layer 0 of a: 0.950" in tips
    assert "layer 0 and layer 2 of a: 0.125" in tips
    assert "b differs from a: 5 of 6 differences have an interval without zero." in page
    table = re.search(r"<caption>b by layer: minus a, and its interval</caption>.*?</table>", page)
    assert table is not None
    assert re.findall(r"<td>(.*?)</td>", table[0])[:6] == ["1.000", "0.5000", "2.000"] * 2
    (lidar,) = pictures(page, "lidar: difference by layer")
    groups = [one for one in lidar.iter("g") if "line" in (one.get("class") or "")]
    for group, model in zip(groups, "bc", strict=True):
        mine = [(row[2], row[7]) for row in ROWS if row[1] == model and row[6] == "lidar"]
        near([Axes(lidar).at(d.attrib["cx"], d.attrib["cy"]) for d in group.iter("circle")], mine, x=0.1, y=0.2)


# --- a training history ---------------------------------------------------------------------------------------------------


def test_a_history_is_drawn_where_it_is() -> None:
    values = {1: [0.0, 8.0, 4.0], 4: [2.0, 10.0, 4.0], 16: [3.0, 2.0, 4.5]}
    rows = [
        ("m", f"step{step}", layer, layer / 4, "metric", "t", "dime", value)
        for step, many in values.items()
        for layer, value in zip((0, 2, 4), many, strict=True)
    ]
    frame = rows_frame(rows)
    heat = plot_steps_heat(frame).axes[0]
    image = heat.images[0].get_array()
    assert image is not None
    assert image.tolist() == [list(column) for column in zip(*values.values(), strict=True)]
    upper, lower = plot_steps_change(frame).axes
    changes = [
        100 * (abs(a[k] - b[k]) + abs(b[k] - c[k])) / 2 / 10 for a, b, c in [tuple(values.values())] for k in range(3)
    ]
    assert list(upper.lines[0].get_ydata()) == pytest.approx(changes)
    assert list(upper.lines[0].get_xdata()) == [0, 2, 4]
    # Within a tenth of the range, 1.0: layer 0 from step 4 on, layer 2 at the end only, layer 4 from the start.
    tops = [round(bar.get_y() + bar.get_height(), 6) for bar in lower.patches]
    assert (tops, [bar.get_x() + bar.get_width() / 2 for bar in lower.patches]) == ([1, 2, 0], [0, 2, 4])
    page = steps_html(frame, title="T", how={})
    drawn = pictures(page, "dime by layer, a curve for each step")
    assert len(drawn) == 2
    for curves in drawn:
        groups = [one for one in curves.iter("g") if "line" in (one.get("class") or "")]
        for place, (group, many) in enumerate(zip(groups, values.values(), strict=True)):
            assert group.get("class") == f"line s{place}"
            dots = [Axes(curves).at(dot.attrib["cx"], dot.attrib["cy"]) for dot in group.iter("circle")]
            near(dots, list(zip((0, 2, 4), many, strict=True)), x=0.1, y=0.2)
    (cells,) = pictures(page, "dime by layer and step")
    tips = {cell.findtext("title"): cell for cell in cells.iter("rect")}
    assert {"dime, step 16, layer 2: 2", "dime, step 4, layer 4: 4", "dime, step 1, layer 2: 8"} <= set(tips)
    strongest = tips["dime, step 4, layer 2: 10"]
    assert strongest.attrib["fill-opacity"] == "1.0"
    assert float(strongest.attrib["x"]) == pytest.approx(30 + 178 / 3, abs=0.06)  # the second of three columns


# --- probes, selections, experiments -----------------------------------------------------------------------------------------


def test_probes_and_choices_are_drawn_where_they_are() -> None:
    table = pl.DataFrame(
        {"layer": [0, 2, 4], "accuracy": [0.4, 0.9, 0.6], "low": [0.3, 0.8, 0.5], "high": [0.5, 0.95, 0.7],
         "validation": [0.1, 0.2, 0.7]}
    )  # fmt: skip
    axes = plot_probes({"one": table}, num_layers=4, chance=0.25).axes[0]
    line, best, guess = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2, 4], [40, 90, 60])
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (4, 60)
    assert guess.get_ydata()[0] == 25
    corners = {tuple(corner) for corner in axes.collections[0].get_paths()[0].vertices.tolist()}
    assert {(0, 30), (0, 50), (2, 80), (2, 95), (4, 50), (4, 70)} <= corners
    rows = [("m", "r", k, k / 4, kind, f"on {kind}", name, value) for kind, name in (("metric", "dime"), ("score", "acc"))
            for k, value in ((4, 0.3), (0, 0.1), (2, 0.2))]  # fmt: skip
    figure = plot_selection(rows_frame(rows), layer=2, rule="auto", choices={"last": 4, "auto": 2}, num_layers=4)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["layer 2, by auto", "acc: on score", "dime"]
    top, *panels = figure.axes
    rule, *dots = top.lines
    assert list(rule.get_xdata()) == [2, 2]
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [(4, 0), (2, 1)]
    assert [text.get_text() for text in top.get_yticklabels()] == ["last", "auto"]
    for panel in panels:
        rule, line = panel.lines
        assert list(rule.get_xdata()) == [2, 2]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2, 4], [0.1, 0.2, 0.3])


def test_an_experiments_curves_have_their_own_colors_and_places() -> None:
    lines = [
        Line((0, 2, 4), (1.0, 3.0, 2.0), "p", band=((0.5, 1.5), (2.5, 3.5), (1.5, 2.5))),
        Line((0, 3), (2.0, 1.0), "q"),
    ]
    panels = (curves_panel("first", "layer", lines), curves_panel("second", "layer", lines[1:]))
    page = experiments_html([Finding("fig6", "x", "claim", (), panels)], title="T", how={})
    (first,), (second,) = pictures(page, "first by layer"), pictures(page, "second by layer")
    for picture, many in ((first, lines), (second, lines[1:])):
        groups = [one for one in picture.iter("g") if "line" in (one.get("class") or "")]
        for group, line in zip(groups, many, strict=True):
            assert group.get("class") == f"line s{'pq'.index(line.label)}"
            expected = list(zip(line.x, line.y, strict=True))
            near(
                [Axes(picture).at(d.attrib["cx"], d.attrib["cy"]) for d in group.iter("circle")], expected, x=0.1, y=0.1
            )
