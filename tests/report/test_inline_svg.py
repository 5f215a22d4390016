from __future__ import annotations

import math
import re
from threading import Event, Thread, current_thread
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG

from midlayer_encoders.report import drawing
from midlayer_encoders.report.inline_svg import PANEL, PHONE, WIDE, Size, panel_svg, rows_size
from midlayer_encoders.report.style import css_colors
from tests.report.svg_reading import Coordinates, assert_near, groups, segments

CURVE = [(0, 31.0), (3, 52.5), (6, 40.0), (12, 47.25), (24, 36.0)]


def new_axes() -> Axes:
    return drawing.panel_grid(1)[1][0]


def curve(*values: float) -> Axes:
    """Return axes with a curve over the layers 0, 1, …"""
    axes = new_axes()
    tips = [f"layer {layer}: {value}" for layer, value in enumerate(values)]
    drawing.draw_points(axes, range(len(values)), values, tips=tips)
    drawing.layer_axis(axes, len(values) - 1)
    return axes


def svg(axes: Axes, size: Size = PANEL, label: str = "x") -> ElementTree.Element:
    axes.set_label(label)
    figure = axes.figure
    drawing.finish(figure)  # type: ignore[arg-type]
    return ElementTree.fromstring(panel_svg(axes, size))


@pytest.mark.parametrize("size", [WIDE, PANEL])
def test_points_marks_levels_and_rules_match_the_ticks(size: Size) -> None:
    layers, values = zip(*CURVE, strict=True)
    axes = new_axes()
    drawing.draw_rule(axes, 12, chosen=True)
    drawing.draw_level(axes, 44.0, "base")
    drawing.draw_points(axes, layers, values, band=([v - 2 for v in values], [v + 3 for v in values]))
    drawing.draw_mark(axes, "last", 24, 36.0, "last")
    drawing.draw_mark(axes, "best", 3, 52.5, "best")
    drawing.layer_axis(axes, 24)
    root = svg(axes, size)
    coordinates = Coordinates(root)
    tolerance = {"x": 0.1, "y": 0.4}
    (band,), (line,) = groups(root, "band"), groups(root, "line")
    assert_near(coordinates.circles(line), CURVE, **tolerance)
    for dot in line.iter("circle"):
        assert size.left <= float(dot.attrib["cx"]) <= size.width - size.right
        assert size.top <= float(dot.attrib["cy"]) <= size.height - size.bottom
    assert_near([coordinates.at(*position) for position in segments(line)], CURVE, **tolerance)
    (band_path,) = band.iter("path")
    shift = float(re.findall(r"[-\d.]+", band_path.attrib["transform"])[1])
    corners = {tuple(np.round(coordinates.at(x, y + shift), 1)) for x, y in segments(band)}
    for layer, value in CURVE:
        for end in (value - 2, value + 3):
            assert min(abs(x - layer) + abs(y - end) for x, y in corners) < 0.6
    last, best = groups(root, "mark")
    assert_near(coordinates.circles(best), [(3, 52.5)], **tolerance)
    position = re.findall(r"[\d.]+", next(last.iter("path")).attrib["transform"])
    assert_near([coordinates.at(*map(float, position))], [(24, 36.0)], **tolerance)
    (level,) = groups(root, "level")
    assert [coordinates.at(*position)[1] for position in segments(level)] == [pytest.approx(44, abs=0.4)] * 2
    (rule,) = groups(root, "rule")
    assert [coordinates.at(*position)[0] for position in segments(rule)] == [pytest.approx(12, abs=0.1)] * 2


def test_points_and_levels_have_tooltips() -> None:
    axes = curve(1.0, 3.0)
    drawing.draw_level(axes, 2.0, "TF-IDF 2.0")
    assert {title.text for title in svg(axes).iter("title")} == {"layer 0: 1.0", "layer 1: 3.0", "TF-IDF 2.0"}


def test_curve_has_a_gap_at_nonfinite_values() -> None:
    (group,) = groups(svg(curve(1.0, 2.0, math.nan, 4.0, math.inf)), "line")
    (path,) = group.iter("path")
    assert re.findall("[ML]", path.attrib["d"])[:3] == ["M", "L", "M"]
    assert [circle.findtext("title") for circle in group.iter("circle")] == [
        "layer 0: 1.0", "layer 1: 2.0", "layer 3: 4.0",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [WIDE, PHONE, PANEL])
def test_baseline_above_every_layer_is_inside_the_panel(size: Size) -> None:
    axes = curve(16.0, 28.0, 16.5)
    drawing.draw_level(axes, 37.2, "TF-IDF 37.2")
    root = svg(axes, size)
    (level,) = groups(root, "level")
    (_, height), _ = segments(level)
    assert size.top <= height < min(float(circle.attrib["cy"]) for circle in root.iter("circle"))


@pytest.mark.parametrize("values", [(1.0,), (5.0, 5.0), (0.0, 0.0), (math.nan,), (1e-9, 2e-9), (-1e7, 1e7)])
def test_degenerate_values_are_drawn(values: tuple[float, ...]) -> None:
    root = svg(curve(*values))
    assert not [value for element in root.iter() for value in element.attrib.values() if "nan" in value]


def test_names_are_escaped_and_never_parsed_as_formulas() -> None:
    text = '<b> & "c" $x^2$'
    axes = new_axes()
    drawing.draw_points(axes, (0,), (1.0,), tips=(text,))
    drawing.write(axes, text, (0, 1.0))
    root = svg(axes, label='"><script>')
    assert root.attrib["aria-label"] == '"><script>'
    assert next(root.iter("title")).text == text
    assert text in [element.text for element in root.iter("text")]


def test_svgs_share_a_page_without_ids_references_or_fixed_colors() -> None:
    axes = curve(1.0, 3.0, 2.0)
    drawing.draw_points(axes, (0, 1), (1.0, 2.0), "dot", style=1)
    drawing.draw_mark(axes, "best", 1, 3.0, "")
    text = panel_svg(axes, PANEL)
    assert not re.search(r"\bid=|href|url\(|xmlns|#[0-9a-f]{6}|DejaVu", text)
    assert {"var(--s0)", "var(--s1)", "var(--best)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", text))
    assert text == panel_svg(axes, PANEL)


def test_ordered_curves_have_a_color_for_each_theme() -> None:
    axes = new_axes()
    for style in range(3):
        drawing.draw_points(axes, (0, 1), (0.0, float(style)), style=style, ordered=3)
    for group, color in zip(groups(svg(axes), "line"), list(css_colors(3).values())[-3:], strict=True):
        assert color.startswith("light-dark(")
        assert f"stroke: {color}" in next(group.iter("path")).attrib["style"]


def test_dots_link_to_pages_with_escaped_urls() -> None:
    axes = new_axes()
    drawing.draw_points(axes, (0, 1), (1.0, 2.0), "disc", label="a<b", tips="pq", links=('./x"&y.html', ""))
    (group,) = groups(svg(axes), "dots")
    assert group.attrib["data-curve"] == "a<b"
    (link,) = group.iter("a")
    assert link.attrib["href"] == './x"&y.html'
    assert [circle.findtext("title") for circle in group.iter("circle")] == ["p", "q"]


def test_named_rows_have_room_for_their_names() -> None:
    names = ["a statement that goes on for a while", "second\nline"]
    axes = new_axes()
    drawing.draw_points(axes, (0.5,), (0,), "disc")
    drawing.row_axis(axes, names)
    size = rows_size(axes)
    assert size.left > 6 * len(names[0])
    assert {names[0], "second", "line"} <= {text.text for text in svg(axes, size).iter("text")}


def test_pages_drawn_in_two_threads_share_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread would draw its words as outlines, after the first one has restored matplotlib's settings."""
    before = dict(rcParams)
    second_draws, first_ended = Event(), Event()
    write = FigureCanvasSVG.print_svg

    def wait_and_write(canvas: FigureCanvasSVG, *args: Any) -> None:
        if current_thread() is second:
            second_draws.set()
            first_ended.wait(10)
        else:
            second.start()
            second_draws.wait(0.2)  # it does not draw before this one ends
        write(canvas, *args)

    def draw() -> str:
        axes = curve(1.0, 3.0)
        axes.set_xlabel("words")
        return panel_svg(axes, WIDE, "values")

    expected = draw()
    drawn: list[str] = []
    second = Thread(target=lambda: drawn.append(draw()))
    monkeypatch.setattr(FigureCanvasSVG, "print_svg", wait_and_write)
    drawn.append(draw())
    first_ended.set()
    second.join()
    assert drawn == [expected] * 2
    assert dict(rcParams) == before
