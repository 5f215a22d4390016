from __future__ import annotations

import re

import pytest

from midlayer_encoders.report.charts import (
    Axis,
    Bars,
    Cells,
    Chart,
    Dots,
    Line,
    Panel,
    Scale,
    layer_axis,
    named_axis,
    place_axis,
)
from midlayer_encoders.report.pages import figure_html


def curve(title: str = "lidar", **options: object) -> Panel:
    line = Line((0, 1), (1.0, 2.0), "a")
    return Panel(title, layer_axis(1), Axis("", 0, 3), (line,), **options)  # type: ignore[arg-type]


def widths(text: str) -> list[str]:
    return re.findall(r'viewBox="0 0 (\d+) \d+" role', text)


def test_a_lone_panel_is_wide_and_has_a_narrow_one_for_phones() -> None:
    text = figure_html(Chart((curve(),)))
    assert widths(text) == ["780", "343"]
    assert text.index('class="wide"') < text.index('class="narrow"')
    assert 'class="panels' not in text


@pytest.mark.parametrize(("count", "columns"), [(2, 3), (4, 4), (5, 3), (7, 4), (9, 3)])
def test_no_panel_is_left_alone_in_the_last_row(count: int, columns: int) -> None:
    text = figure_html(Chart((curve(),) * count))
    assert f'style="--columns:{columns};' in text
    assert widths(text) == ["220"] * count


def test_panels_of_a_stack_share_a_figure() -> None:
    bars = Panel("settled", layer_axis(1), Axis("", 0, 3), (Bars((0,), (2.0,), 0.0, ("layer 0: step 8",)),))
    text = figure_html(Chart((curve(), bars), stack=2))
    assert text.count("<figure>") == 1
    assert text.index("<h3>lidar</h3>") < text.index("<figcaption>settled</figcaption>")
    assert widths(text) == ["220", "220"]


def test_rows_with_names_are_as_wide_as_their_names_need() -> None:
    panels = [Panel("p", Axis("points", 0, 1), named_axis(["x" * length]), (Dots((0.5,), (0,)),)) for length in (4, 40)]
    short, long = map(int, re.findall(r"max-width:(\d+)px", figure_html(Chart(tuple(panels)))))
    assert long - short == 6 * 36
    assert 'class="panels rows"' in figure_html(Chart(tuple(panels)))


def test_captions_say_what_is_to_the_right_and_what_colors_mean() -> None:
    cells = Cells(((1.0, 2.0),), (("a", "b"),), Scale(1, 2, ("1", "2")))
    panel = Panel("map", place_axis("step", [1, 2]), place_axis("layer", [0]), (cells,))
    assert "1 (faint) to 2" in figure_html(Chart((panel,)))
    assert "by layer" not in figure_html(Chart((curve(),)))
    beta = Line((0, 1), (1.0, 2.0))
    assert "by exponent" in figure_html(Chart((Panel("p", Axis("exponent", 0, 1), Axis("", 0, 3), (beta,)),)))
    words = figure_html(Chart((curve(caption=("accuracy", "best 60.0 at 3")),) * 2))
    assert '<span class="whole">accuracy ·</span> <span class="whole">best 60.0 at 3</span>' in words


def test_keys_are_shared_or_beside_each_panel() -> None:
    shared = figure_html(Chart((curve(), curve("dime"))))
    assert shared.count('<ul class="legend">') == 1
    own = figure_html(Chart((curve(ordered=1), curve("dime", ordered=1)), shared_key=False))
    assert own.count('<ul class="legend">') == 2
    assert own.count('<path d="M0 6H32" style="stroke: light-dark(') == 2


def test_a_point_without_a_text_of_its_own_says_its_label_and_values() -> None:
    assert "<title>a, layer 1: 2</title>" in figure_html(Chart((curve(),)))
    assert "<title>lidar, layer 0: 1</title>" in figure_html(
        Chart((Panel("lidar", layer_axis(1), Axis("", 0, 3), (Line((0,), (1.0,)),)),))
    )
