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
from midlayer_encoders.report.inline_svg import figure_svg
from midlayer_encoders.report.style import css_colors

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


def svg(axes: Axes, title: str = "x") -> ElementTree.Element:
    drawing.set_title(axes, title)
    return ElementTree.fromstring(figure_svg(drawing.finish(axes.figure)))  # type: ignore[arg-type]


def groups(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Return the groups of a class."""
    return [group for group in root.iter("g") if group.get("class") == name]


def test_points_are_at_their_layers_and_values() -> None:
    """The positions are the values, scaled and shifted."""
    layers, values = zip(*CURVE, strict=True)
    axes = new_axes()
    drawing.draw_points(axes, layers, values)
    drawing.layer_axis(axes, 24)
    (line,) = groups(svg(axes), "line")
    for name, expected in (("x", layers), ("y", values)):
        positions = [float(point.attrib[name]) for point in line.iter("use")]
        fit = np.polyfit(expected, positions, 1)
        np.testing.assert_allclose(np.polyval(fit, expected), positions, atol=0.02)
        assert fit[0] > 0 if name == "x" else fit[0] < 0


def test_points_and_levels_have_tooltips() -> None:
    axes = curve(1.0, 3.0)
    drawing.draw_level(axes, 2.0, "TF-IDF 2.0")
    assert {title.text for title in svg(axes).iter("title")} == {"layer 0: 1.0", "layer 1: 3.0", "TF-IDF 2.0"}


def test_curve_has_a_gap_at_nonfinite_values() -> None:
    (group,) = groups(svg(curve(1.0, 2.0, math.nan, 4.0, math.inf)), "line")
    path = next(group.iter("path"))
    assert re.findall("[ML]", path.attrib["d"])[:3] == ["M", "L", "M"]
    assert [point.findtext("title") for point in group.iter("use")] == [
        "layer 0: 1.0", "layer 1: 2.0", "layer 3: 4.0",
    ]  # fmt: skip


@pytest.mark.parametrize("values", [(1.0,), (5.0, 5.0), (0.0, 0.0), (math.nan,), (1e-9, 2e-9), (-1e7, 1e7)])
def test_degenerate_values_are_drawn(values: tuple[float, ...]) -> None:
    root = svg(curve(*values))
    assert not [value for element in root.iter() for value in element.attrib.values() if "nan" in value]


def test_names_are_escaped_and_never_parsed_as_formulas() -> None:
    text = '<b> & "c" $x^2$'
    axes = new_axes()
    drawing.draw_points(axes, (0,), (1.0,), tips=(text,))
    drawing.write(axes, text, (0, 1.0))
    root = svg(axes, title='"><script>')
    assert root.attrib["aria-label"] == '"><script>'
    assert next(root.iter("title")).text == text
    assert text in [element.text for element in root.iter("text")]


def test_svgs_have_colors_of_the_page_and_no_fonts_or_addresses() -> None:
    axes = curve(1.0, 3.0, 2.0)
    drawing.draw_points(axes, (0, 1), (1.0, 2.0), "dot", style=1)
    drawing.draw_mark(axes, "best", 1, 3.0, "")
    text = figure_svg(axes.figure)  # type: ignore[arg-type]
    assert not re.search(r"url\(|xmlns|https?:|#[0-9a-f]{6};|DejaVu", text)
    assert {"var(--s0)", "var(--s1)", "var(--best)", "var(--soft)"} <= set(re.findall(r"var\(--\w+\)", text))
    assert text == figure_svg(axes.figure)  # type: ignore[arg-type]


def test_figures_of_a_page_share_no_ids() -> None:
    ids = [{element.get("id") for element in svg(curve(1.0, 3.0), title).iter() if element.get("id")} for title in "ab"]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_ordered_curves_have_a_color_for_each_theme() -> None:
    axes = new_axes()
    for style in range(3):
        drawing.draw_points(axes, (0, 1), (0.0, float(style)), style=style, ordered=3)
    for group, color in zip(groups(svg(axes), "line"), list(css_colors(3).values())[-3:], strict=True):
        assert color.startswith("light-dark(")
        assert f"stroke: {color}" in next(group.iter("path")).attrib["style"]


def test_pages_drawn_in_two_threads_share_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread would draw its words as outlines, after the first one has restored matplotlib's settings."""
    before = dict(rcParams)
    second_draws, first_ended = Event(), Event()
    write = FigureCanvasSVG.print_svg

    def wait_and_write(canvas: FigureCanvasSVG, *args: Any, **options: Any) -> None:
        if current_thread() is second:
            second_draws.set()
            first_ended.wait(10)
        elif second.ident is None:  # the layout asks for a renderer before
            second.start()
            second_draws.wait(0.2)  # it does not draw before this one ends
        write(canvas, *args, **options)

    def draw() -> str:
        axes = curve(1.0, 3.0)
        axes.set_xlabel("words")
        return figure_svg(axes.figure)  # type: ignore[arg-type]

    expected = draw()
    drawn: list[str] = []
    second = Thread(target=lambda: drawn.append(draw()))
    monkeypatch.setattr(FigureCanvasSVG, "print_svg", wait_and_write)
    drawn.append(draw())
    first_ended.set()
    second.join()
    assert drawn == [expected] * 2
    assert dict(rcParams) == before
