from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from midlayer_encoders.report.style import DASHES, SERIES
from midlayer_encoders.report.svg import PANEL, PHONE, WIDE, Level, Line, Mark, Size, chart


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def line(*values: float) -> Line:
    return Line(list(enumerate(values)), [f"layer {layer}: {value}" for layer, value in enumerate(values)])


def test_points_are_where_their_values_are() -> None:
    root = parsed(chart([line(1.0, 3.0, 2.0)], 2, size=PANEL, label="x"))
    x, y = ([float(circle.attrib[f"c{axis}"]) for circle in root.iter("circle")] for axis in "xy")
    assert x == [PANEL.left, pytest.approx((x[0] + x[2]) / 2, abs=0.1), PANEL.width - PANEL.right]
    # Higher values stand higher, and the middle value half-way.
    assert y[1] < y[2] < y[0]
    assert y[2] == pytest.approx((y[0] + y[1]) / 2, abs=0.1)


def test_every_point_has_its_tip() -> None:
    root = parsed(chart([line(1.0, 3.0)], 1, size=PANEL, label="x"))
    assert [title.text for title in root.iter("title")] == ["layer 0: 1.0", "layer 1: 3.0"]


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    root = parsed(chart([line(1.0, 2.0, math.nan, 4.0, math.inf)], 4, size=PANEL, label="x"))
    (path,) = root.findall("g/path")
    assert re.findall("[ML]", path.attrib["d"]) == ["M", "L", "M"]
    assert len(list(root.iter("circle"))) == 3


@pytest.mark.parametrize("size", [WIDE, PHONE, PANEL])
def test_a_baseline_above_every_layer_is_inside_the_picture(size: Size) -> None:
    root = parsed(chart([line(16.0, 28.0, 16.5)], 2, size=size, label="x", level=Level(37.2, "TF-IDF 37.2")))
    (level,) = (path for path in root.iter("path") if path.get("class") == "level")
    height = float(level.attrib["d"].split()[1].split("H")[0])
    assert size.top <= height < min(float(circle.attrib["cy"]) for circle in root.iter("circle"))
    assert ("TF-IDF 37.2" in [text.text for text in root.iter("text")]) is size.words


@pytest.mark.parametrize("level", [25.0, 50.0, 52.0])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_words_of_a_baseline_stand_clear_of_the_curve(size: Size, level: float) -> None:
    values = [50 - (k - 12) ** 2 / 10 for k in range(31)]
    root = parsed(chart([line(*values)], 30, size=size, label="x", level=Level(level, "TF-IDF 50.0")))
    (word,) = (text for text in root.iter("text") if text.get("class") == "word")
    x, y = float(word.attrib["x"]), float(word.attrib["y"])
    near = [circle for circle in root.iter("circle") if x <= float(circle.attrib["cx"]) <= x + 75]
    assert all(not y - 11 < float(circle.attrib["cy"]) < y + 3 for circle in near)


def test_marks_are_drawn_and_said_with_the_gain_between_them() -> None:
    marks = [Mark("last", 2, 2.0, "last: 2.0"), Mark("best", 1, 3.0, "layer 1: 3.0")]
    texts = [
        text.text
        for text in parsed(chart([line(1.0, 3.0, 2.0)], 2, size=WIDE, label="x", marks=marks, gain="+1.0")).iter("text")
    ]
    assert {"last: 2.0", "layer 1: 3.0", "+1.0"} <= set(texts)
    small = parsed(chart([line(1.0, 3.0, 2.0)], 2, size=PANEL, label="x", marks=marks, gain="+1.0"))
    assert len([one for one in small.iter() if one.get("class") in {"best", "last"}]) == 2
    assert "+1.0" not in [text.text for text in small.iter("text")]


@pytest.mark.parametrize("values", [(1.0,), (5.0, 5.0), (0.0, 0.0), (math.nan,), (1e-9, 2e-9), (-1e7, 1e7)])
def test_degenerate_values_still_make_a_picture(values: tuple[float, ...]) -> None:
    text = chart([line(*values)], len(values) - 1, size=PANEL, label="x")
    assert "nan" not in text.split("<title>")[0]
    parsed(text)


def test_labels_are_escaped() -> None:
    text = chart([Line([(0, 1.0)], ['<b> & "c"'])], 0, size=PANEL, label='"><script>')
    assert parsed(text).attrib["aria-label"] == '"><script>'
    assert next(parsed(text).iter("title")).text == '<b> & "c"'


def test_there_is_a_style_for_every_number() -> None:
    from midlayer_encoders.report.style import CSS

    assert all(f".s{number} {{" in CSS for number in range(len(SERIES) * len(DASHES)))
