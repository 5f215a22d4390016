from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from midlayer_encoders.report.axes import layer_axis
from midlayer_encoders.report.charts import Dots, Front, Level, Line, Mark, Panel, Part, value_axis
from midlayer_encoders.report.style import STYLES, page_css
from midlayer_encoders.report.svg import PANEL, PHONE, WIDE, Size, panel_svg


def line(*values: float) -> Line:
    tips = tuple(f"layer {layer}: {value}" for layer, value in enumerate(values))
    return Line(tuple(range(len(values))), values, tips=tips)


def drawn(*parts: Part, size: Size = PANEL, label: str = "x", gain: str = "") -> ElementTree.Element:
    """Return the picture of some parts, the first of which that is a line says how many layers there are."""
    num_layers = next(len(part.x) for part in parts if isinstance(part, Line)) - 1
    panel = Panel("x", layer_axis(num_layers), value_axis(parts), parts, label, gain=gain)
    return ElementTree.fromstring(panel_svg(panel, size))


def test_points_are_where_their_values_are() -> None:
    root = drawn(line(1.0, 3.0, 2.0))
    x, y = ([float(circle.attrib[f"c{axis}"]) for circle in root.iter("circle")] for axis in "xy")
    assert x == [PANEL.left, pytest.approx((x[0] + x[2]) / 2, abs=0.1), PANEL.width - PANEL.right]
    # Higher values stand higher, and the middle value half-way.
    assert y[1] < y[2] < y[0]
    assert y[2] == pytest.approx((y[0] + y[1]) / 2, abs=0.1)


def test_every_point_has_its_tip() -> None:
    root = drawn(line(1.0, 3.0))
    assert [title.text for title in root.iter("title")] == ["layer 0: 1.0", "layer 1: 3.0"]


def test_a_line_is_broken_where_a_value_is_not_finite() -> None:
    root = drawn(line(1.0, 2.0, math.nan, 4.0, math.inf))
    (path,) = root.findall("g/path")
    assert re.findall("[ML]", path.attrib["d"]) == ["M", "L", "M"]
    assert len(list(root.iter("circle"))) == 3


@pytest.mark.parametrize("size", [WIDE, PHONE, PANEL])
def test_a_baseline_above_every_layer_is_inside_the_picture(size: Size) -> None:
    root = drawn(Level(37.2, "TF-IDF 37.2"), line(16.0, 28.0, 16.5), size=size)
    (level,) = (path for path in root.iter("path") if path.get("class") == "level")
    height = float(level.attrib["d"].split()[1].split("H")[0])
    assert size.top <= height < min(float(circle.attrib["cy"]) for circle in root.iter("circle"))
    assert ("TF-IDF 37.2" in [text.text for text in root.iter("text")]) is size.words


@pytest.mark.parametrize("level", [25.0, 50.0, 52.0])
@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_the_words_of_a_baseline_stand_clear_of_the_curve(size: Size, level: float) -> None:
    values = [50 - (k - 12) ** 2 / 10 for k in range(31)]
    root = drawn(Level(level, "TF-IDF 50.0"), line(*values), size=size)
    (word,) = (text for text in root.iter("text") if text.get("class") == "word")
    x, y = float(word.attrib["x"]), float(word.attrib["y"])
    near = [circle for circle in root.iter("circle") if x <= float(circle.attrib["cx"]) <= x + 75]
    assert all(not y - 11 < float(circle.attrib["cy"]) < y + 3 for circle in near)


def test_marks_are_drawn_and_said_with_the_gain_between_them() -> None:
    marks = [Mark("last", 2, 2.0, "last: 2.0"), Mark("best", 1, 3.0, "layer 1: 3.0")]
    texts = [text.text for text in drawn(line(1.0, 3.0, 2.0), *marks, size=WIDE, gain="+1.0").iter("text")]
    assert {"last: 2.0", "layer 1: 3.0", "+1.0"} <= set(texts)
    small = drawn(line(1.0, 3.0, 2.0), *marks, gain="+1.0")
    assert len([one for one in small.iter() if one.get("class") in {"best", "last"}]) == 2
    assert "+1.0" not in [text.text for text in small.iter("text")]


@pytest.mark.parametrize("values", [(1.0,), (5.0, 5.0), (0.0, 0.0), (math.nan,), (1e-9, 2e-9), (-1e7, 1e7)])
def test_degenerate_values_still_make_a_picture(values: tuple[float, ...]) -> None:
    root = drawn(line(*values))
    assert not [value for one in root.iter() for value in one.attrib.values() if "nan" in value]


def test_labels_are_escaped() -> None:
    root = drawn(Line((0,), (1.0,), tips=('<b> & "c"',)), label='"><script>')
    assert root.attrib["aria-label"] == '"><script>'
    assert next(root.iter("title")).text == '<b> & "c"'


def test_there_is_a_style_for_every_number() -> None:
    assert all(f".s{number} {{" in page_css() for number in range(STYLES))


@pytest.mark.parametrize("size", [WIDE, PHONE])
def test_words_stand_clear_of_each_other_where_the_best_layer_is_next_to_the_last_and_baselines_are_close(
    size: Size,
) -> None:
    values = [20.0 + k for k in range(30)] + [47.0]
    marks = [Mark("last", 30, 47.0, "last: 47.0"), Mark("best", 29, 49.0, "layer 29: 49.0")]
    levels = [Level(38.0, "TF-IDF 38.0"), Level(38.6, "MiniLM 38.6", style=1)]
    root = drawn(*levels, line(*values), *marks, size=size, gain="+2.0")
    words = {text.text: text for text in root.iter("text")}
    best, gain = words["layer 29: 49.0"], words["+2.0"]
    assert float(best.attrib["x"]) + 7.0 * len("layer 29: 49.0") / 2 < float(gain.attrib["x"])
    one, other = (float(words[level.text].attrib["y"]) for level in levels)
    assert abs(one - other) > 14
    dashes = [path.get("class") for path in root.iter("path") if "level" in path.get("class", "")]
    assert dashes == ["level", "level dotted"]


def test_a_front_is_level_up_to_the_next_point() -> None:
    root = drawn(line(1.0, 3.0, 2.0), Front((0, 1, 2), (1.0, 3.0, 3.0), "front"))
    (first, second, last), (path,) = root.iter("circle"), root.findall("path[@class='front']")
    (a, b), (c, d), e = *((one.attrib["cx"], one.attrib["cy"]) for one in (first, second)), last.attrib["cx"]
    assert path.attrib["d"] == f"M{a} {b}H{c}V{d}H{e}V{d}"
    assert path.attrib["data-curve"] == "front"


def test_dots_open_pages_and_their_addresses_are_escaped() -> None:
    root = drawn(line(1.0, 2.0), Dots((0, 1), (1.0, 2.0), label="a<b", links=('./x"&y.html', "")))
    (group,) = root.findall("g[@data-curve='a<b']")
    assert [one.tag for one in group] == ["a", "circle"]
    assert group[0].attrib["href"] == './x"&y.html'
