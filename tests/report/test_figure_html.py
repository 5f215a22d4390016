from __future__ import annotations

import re
from typing import Any

import pytest
from matplotlib.figure import Figure

from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import METRIC_MEANINGS
from midlayer_encoders.report.pages import figure_html


def make_figure(count: int = 1, *, caption: tuple[str, ...] = (), x_label: str = "layer", **options: Any) -> Figure:
    figure, panels = drawing.panel_grid(count)
    for axes in panels:
        drawing.draw_points(axes, (0, 1), (1.0, 2.0), label="a", **options)
        drawing.layer_axis(axes, 1, x_label)
        drawing.set_title(axes, "lidar", caption=caption)
    return drawing.finish(figure)


def widths(text: str) -> list[str]:
    return re.findall(r'viewBox="0 0 (\d+) \d+" role', text)


def test_single_panel_has_wide_and_narrow_versions() -> None:
    text = figure_html(make_figure())
    assert widths(text) == ["780", "343"]
    assert text.index('class="wide"') < text.index('class="narrow"')
    assert 'class="panels' not in text


@pytest.mark.parametrize(("count", "columns"), [(2, 3), (4, 4), (5, 3), (7, 4), (9, 3)])
def test_last_row_never_has_a_single_panel(count: int, columns: int) -> None:
    text = figure_html(make_figure(count))
    assert f'style="--columns:{columns}"' in text
    assert widths(text) == ["220"] * count


def test_named_rows_are_as_wide_as_their_names() -> None:
    figure, panels = drawing.panel_grid(2)
    for axes, length in zip(panels, (4, 40), strict=True):
        drawing.draw_points(axes, (0.5,), (0,), "disc")
        drawing.row_axis(axes, ["x" * length])
    text = figure_html(drawing.finish(figure))
    short, long = map(int, re.findall(r"max-width:(\d+)px", text))
    assert long - short == 6 * 36
    assert 'class="panels rows"' in text


@pytest.mark.parametrize("count", [1, 2])
def test_horizontal_axis_is_labeled_and_the_vertical_one_if_the_panel_is_wide(count: int) -> None:
    figure = make_figure(count, x_label="exponent")
    drawing.finish(figure, y_label="points")
    labels = re.findall(r">([a-z]+)</text>", figure_html(figure))
    assert labels == (["exponent", "points"] if count == 1 else ["exponent"]) * 2


def test_panels_say_what_their_metric_means_where_asked() -> None:
    meaning = METRIC_MEANINGS["lidar"]
    assert f"<figcaption><h3>lidar</h3>{meaning}</figcaption>" in figure_html(make_figure(2), meanings=True)
    assert meaning not in figure_html(make_figure(2))


@pytest.mark.long
def test_captions_keep_names_with_hyphens() -> None:
    for length in range(0, 40, 3):  # wherever its line breaks; its parts have three characters or more
        assert "all-MiniLM-L6-v2 52.8" in figure_html(make_figure(2, caption=("x" * length, "all-MiniLM-L6-v2 52.8")))
    text = figure_html(make_figure(2, caption=("accuracy", "best 60.0 at 3")))
    assert '<span class="whole">accuracy ·</span> <span class="whole">best 60.0 at 3</span>' in text


def test_all_panels_share_a_legend() -> None:
    assert figure_html(make_figure(2)).count('<ul class="legend">') == 1
    ordered = figure_html(make_figure(2, ordered=1))
    assert ordered.count('<path d="M0 6H32" style="stroke: light-dark(') == 1
