from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from midlayer_encoders.report.charts import (
    Bars,
    Cells,
    Dots,
    Level,
    Line,
    Mark,
    Panel,
    Part,
    Rule,
    Scale,
    Word,
    layer_axis,
    named_axis,
    place_axis,
    value_axis,
)
from midlayer_encoders.report.inline_svg import MAP, PANEL, PHONE, WIDE, Size, panel_svg, rows_size
from midlayer_encoders.report.style import css_colors
from tests.report.svg_reading import Coordinates, assert_near, groups, segments

CURVE = [(0, 31.0), (3, 52.5), (6, 40.0), (12, 47.25), (24, 36.0)]


def line(*values: float) -> Line:
    tips = tuple(f"layer {layer}: {value}" for layer, value in enumerate(values))
    return Line(tuple(range(len(values))), values, tips=tips)


def svg(*parts: Part, size: Size = PANEL, label: str = "x", gain: str = "", ordered: int = 0) -> ElementTree.Element:
    """Return the SVG of parts, the first curve of which determines the number of layers."""
    num_layers = next(len(part.x) for part in parts if isinstance(part, Line)) - 1
    panel = Panel("x", layer_axis(num_layers), value_axis(parts), parts, label, gain=gain, ordered=ordered)
    return ElementTree.fromstring(panel_svg(panel, size))


@pytest.mark.parametrize("size", [WIDE, PANEL])
def test_points_marks_levels_and_rules_are_where_the_ticks_say(size: Size) -> None:
    layers, values = zip(*CURVE, strict=True)
    parts: tuple[Part, ...] = (
        Rule(12, "chosen"),
        Level(44.0, "base"),
        Line(layers, values, band=tuple((value - 2, value + 3) for value in values)),
        Mark("last", 24, 36.0, "last"),
        Mark("best", 3, 52.5, "best"),
    )
    root = ElementTree.fromstring(panel_svg(Panel("x", layer_axis(24), value_axis(parts), parts, gain="+16.5"), size))
    coordinates = Coordinates(root)
    close = {"x": 0.1, "y": 0.4}
    band, curve = groups(root, "line")
    assert_near(coordinates.circles(curve), CURVE, **close)
    for dot in curve.iter("circle"):
        assert size.left <= float(dot.attrib["cx"]) <= size.width - size.right
        assert size.top <= float(dot.attrib["cy"]) <= size.height - size.bottom
    assert_near([coordinates.at(*place) for place in segments(curve)], CURVE, **close)
    (shade,) = band.iter("path")
    shift = float(re.findall(r"[-\d.]+", shade.attrib["transform"])[1])
    corners = {tuple(np.round(coordinates.at(x, y + shift), 1)) for x, y in segments(band)}
    for layer, value in CURVE:
        for end in (value - 2, value + 3):
            assert min(abs(x - layer) + abs(y - end) for x, y in corners) < 0.6
    last, best = groups(root, "mark")[:2]
    assert_near(coordinates.circles(best), [(3, 52.5)], **close)
    place = re.findall(r"[\d.]+", next(last.iter("path")).attrib["transform"])
    assert_near([coordinates.at(*map(float, place))], [(24, 36.0)], **close)
    (level,) = groups(root, "level")
    assert [coordinates.at(*place)[1] for place in segments(level)] == [pytest.approx(44, abs=0.4)] * 2
    (rule,) = groups(root, "rule")
    assert [coordinates.at(*place)[0] for place in segments(rule)] == [pytest.approx(12, abs=0.1)] * 2


def test_cells_are_in_their_row_and_column_and_darker_for_higher_values() -> None:
    values = np.array([[0.0, 0.25, 0.5], [0.75, 1.0, np.nan]])
    tips = tuple(tuple(f"{row} {column}" for column in range(3)) for row in range(2))
    cells = Cells(tuple(map(tuple, values.tolist())), tips, Scale(0, 1, ("0", "1")))
    panel = Panel("m", place_axis("", ["c0", "c1", "c2"]), place_axis("", ["r0", "r1"]), (cells,))
    root = ElementTree.fromstring(panel_svg(panel, MAP))
    ticks = {text.text: (float(text.attrib["x"]), float(text.attrib["y"])) for text in root.iter("text")}
    (group,) = groups(root, "cells")
    paths = list(group.iter("path"))
    assert len(paths) == 6
    for path in paths:
        row, column = map(int, (path.findtext("title") or "").split())
        corners = np.array([list(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path.attrib["d"])])
        x, y = (corners.min(0) + corners.max(0)) / 2
        assert x == pytest.approx(ticks[f"c{column}"][0], abs=0.2)
        assert y == pytest.approx(ticks[f"r{row}"][1] - 4.4, abs=0.3)
        style = path.attrib["style"]
        if np.isnan(values[row, column]):
            assert "fill: var(--missing)" in style
        else:
            opacity = re.search(r"fill-opacity: ([\d.]+)", style)
            strength = 0.06 + 0.94 * values[row, column]
            assert float(opacity[1] if opacity else 1) == pytest.approx(strength, abs=0.02)
    assert ticks["r1"][1] < ticks["r0"][1]  # the first row is at the bottom


def test_every_point_bar_and_level_has_its_tooltip() -> None:
    parts = (line(1.0, 3.0), Bars((0, 1), (2.0, 1.0), 0.0, ("bar 0", "bar 1")), Level(2.0, "TF-IDF 2.0"))
    root = svg(*parts)
    assert {title.text for title in root.iter("title")} == {
        "layer 0: 1.0", "layer 1: 3.0", "bar 0", "bar 1", "TF-IDF 2.0",
    }  # fmt: skip
    assert [path.findtext("title") for group in groups(root, "bars") for path in group.iter("path")] == [
        "bar 0",
        "bar 1",
    ]


def test_a_curve_has_a_gap_where_a_value_is_not_finite() -> None:
    root = svg(line(1.0, 2.0, math.nan, 4.0, math.inf))
    (group,) = groups(root, "line")
    (path,) = group.iter("path")
    assert re.findall("[ML]", path.attrib["d"])[:3] == ["M", "L", "M"]
    assert [circle.findtext("title") for circle in group.iter("circle")] == [
        "layer 0: 1.0", "layer 1: 2.0", "layer 3: 4.0",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [WIDE, PHONE, PANEL])
def test_a_baseline_above_every_layer_is_inside_the_panel(size: Size) -> None:
    root = svg(Level(37.2, "TF-IDF 37.2"), line(16.0, 28.0, 16.5), size=size)
    (level,) = groups(root, "level")
    (_, height), _ = segments(level)
    assert size.top <= height < min(float(circle.attrib["cy"]) for circle in root.iter("circle"))


def test_wide_panels_show_the_texts_of_marks_and_the_gain() -> None:
    marks = [Mark("last", 2, 2.0, "last: 2.0"), Mark("best", 1, 3.0, "layer 1: 3.0")]
    texts = {text.text for text in svg(line(1.0, 3.0, 2.0), *marks, size=WIDE, gain="+1.0").iter("text")}
    assert {"last: 2.0", "layer 1: 3.0", "+1.0"} <= texts
    small = svg(line(1.0, 3.0, 2.0), *marks, gain="+1.0")
    assert len(groups(small, "mark")) == 2
    assert not {"last: 2.0", "+1.0"} & {text.text for text in small.iter("text")}


@pytest.mark.parametrize("values", [(1.0,), (5.0, 5.0), (0.0, 0.0), (math.nan,), (1e-9, 2e-9), (-1e7, 1e7)])
def test_degenerate_values_are_drawn(values: tuple[float, ...]) -> None:
    root = svg(line(*values))
    assert not [value for element in root.iter() for value in element.attrib.values() if "nan" in value]


def test_names_are_escaped_and_never_parsed_as_formulas() -> None:
    text = '<b> & "c" $x^2$'
    root = svg(Line((0,), (1.0,), tips=(text,)), Word(0, 1.0, text), label='"><script>')
    assert root.attrib["aria-label"] == '"><script>'
    assert next(root.iter("title")).text == text
    assert text in [element.text for element in root.iter("text")]


def test_svgs_share_a_page_without_ids_references_or_fixed_colors() -> None:
    parts = (line(1.0, 3.0, 2.0), Dots((0, 1), (1.0, 2.0), "ring", style=1), Mark("best", 1, 3.0, ""))
    text = panel_svg(Panel("x", layer_axis(2), value_axis(parts), parts), PANEL)
    assert not re.search(r"\bid=|href|url\(|xmlns|#[0-9a-f]{6}|DejaVu", text)
    assert {"var(--s0)", "var(--s1)", "var(--best)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", text))
    assert text == panel_svg(Panel("x", layer_axis(2), value_axis(parts), parts), PANEL)


def test_ordered_curves_have_a_color_for_each_theme() -> None:
    curves = [Line((0, 1), (0.0, float(k)), style=k) for k in range(3)]
    root = svg(*curves, ordered=3)
    for group, color in zip(groups(root, "line"), list(css_colors(3).values())[-3:], strict=True):
        assert color.startswith("light-dark(")
        assert f"stroke: {color}" in next(group.iter("path")).attrib["style"]


def test_a_front_is_level_up_to_the_next_point_and_has_no_points() -> None:
    root = svg(line(1.0, 3.0, 2.0), Line((0, 1, 2), (1.0, 3.0, 3.0), "front", front=True))
    (curve,), (front,) = groups(root, "line"), groups(root, "front")
    places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in curve.iter("circle")]
    (a, b), (c, d), (e, _) = places
    assert list(dict.fromkeys(segments(front))) == [(a, b), (c, b), (c, d), (e, d)]
    assert front.attrib["data-curve"] == "front"
    assert not list(front.iter("circle"))


def test_dots_open_pages_and_their_urls_are_escaped() -> None:
    root = svg(line(1.0, 2.0), Dots((0, 1), (1.0, 2.0), label="a<b", links=('./x"&y.html', "")))
    (group,) = groups(root, "dots")
    assert group.attrib["data-curve"] == "a<b"
    (link,) = group.iter("a")
    assert link.attrib["href"] == './x"&y.html'
    assert [circle.findtext("title") for circle in group.iter("circle")] == ["a<b, layer 0: 1", "a<b, layer 1: 2"]


def test_named_rows_have_room_for_their_names() -> None:
    names = ["a statement that goes on for a while", "second\nline"]
    panel = Panel("p", layer_axis(1), named_axis(names), (Dots((0.5,), (0,)),))
    root = ElementTree.fromstring(panel_svg(panel, rows_size(panel)))
    assert {names[0], "second", "line"} <= {text.text for text in root.iter("text")}
    assert rows_size(panel).left > 6 * len(names[0])
