"""Figures draw the numbers of their frames, with legends and color scales."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from PIL import Image

from midlayer_encoders.report import drawing, plot_metrics, plot_steps_curves
from midlayer_encoders.report.comparison_page import DIFFERENCES, plot_differences
from midlayer_encoders.report.labels import format_signed, number
from midlayer_encoders.report.style import LIGHT, SERIES, ordered_colors
from tests.report.drawn_artists import artists, points
from tests.report.made_frames import metrics_frame, rows_frame

FINITE = st.floats(-1e8, 1e8, allow_nan=False, allow_subnormal=False)
STEPS = (1, 8, 64)


def history() -> pl.DataFrame:
    return rows_frame(
        [
            ("m", f"step{step}", layer, layer / 3, "metric", "t", name, math.nan if step == layer == 1 else step**0.5 * layer + 1)
            for name in ("lidar", "dime")
            for step in STEPS
            for layer in range(4)
        ]
    )  # fmt: skip


def panel() -> Axes:
    return drawing.panel_grid(1)[1][0]


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_padded_range_holds_all_values(values: list[float]) -> None:
    low, high = drawing.pad_range(values)
    assert low < min(values) <= max(values) < high


def test_numbers_are_formatted() -> None:
    assert [number(value) for value in (0.05, -12.34, math.inf, -math.inf)] == ["0.1", "−12.3", "∞", "−∞"]
    assert [format_signed(value) for value in (0.04, -0.04, 1.0)] == ["0.0", "0.0", "+1.0"]


def test_metrics_have_a_color_per_dataset_and_mark_the_selected_layer() -> None:
    frame = metrics_frame(6, names=["lidar", "dime"], datasets=list("abcdefg"))
    for axes, name in zip(plot_metrics(frame, chosen=3).axes, ("lidar", "dime"), strict=True):
        for style, (line, dataset) in enumerate(zip(artists(axes, "line"), "abcdefg", strict=True)):
            rows = frame.filter(name=name, dataset=dataset)
            assert points(line) == rows.select("layer", "value").rows()
            assert to_hex(line.get_color()) == SERIES[style % len(SERIES)]
        (rule,) = artists(axes, "rule")
        assert list(rule.get_xdata()) == [3, 3]


def test_steps_have_ordered_colors_and_gaps() -> None:
    axes = plot_steps_curves(history()).axes[0]
    lines = artists(axes, "line")
    assert [to_hex(line.get_color()) for line in lines] == list(ordered_colors(3))
    assert points(lines[1]) == [(layer, pytest.approx(8**0.5 * layer + 1)) for layer in range(4)]
    assert [layer for layer, value in points(lines[0]) if math.isnan(value)] == [1]


def test_dots_marks_levels_and_texts_are_at_their_coordinates() -> None:
    axes = panel()
    drawing.draw_points(axes, [0, 1], [1.0, 2.0], "disc", style=1)
    drawing.draw_points(axes, [0.5, 1.5], [3.0, 3.0], "dot", style=2)
    drawing.draw_mark(axes, 1, 3.5, "layer 1: 3.5")
    drawing.draw_mark(axes, 3, 1.0, best=False)
    drawing.draw_level(axes, 2.5, "level")
    discs, dots = artists(axes, "dots")
    assert (points(discs), points(dots)) == ([(0, 1), (1, 2)], [(0.5, 3), (1.5, 3)])
    best, last = artists(axes, "mark")
    assert (points(best), to_hex(best.get_color())) == ([(1, 3.5)], LIGHT["best"])
    assert (points(last), to_hex(last.get_color())) == ([(3, 1.0)], LIGHT["ink"])
    (level,) = artists(axes, "level")
    assert (level.get_ydata()[0], level.get_label()) == (2.5, "level")
    assert [text.get_text() for text in axes.texts] == ["layer 1: 3.5"]
    drawing.value_axis(axes)
    low, high = axes.get_ylim()
    assert low < 1 < 3.5 < high


def test_amounts_far_apart_have_a_logarithmic_axis() -> None:
    near, far = panel(), panel()
    drawing.amount_axis(near, "bytes", [1024, 1536])
    drawing.amount_axis(far, "parameters", [22e6, 1.1e9])
    assert (near.get_xscale(), far.get_xscale()) == ("linear", "log")
    far.figure.draw_without_rendering()
    low, high = far.get_xlim()
    labels = zip(far.get_xticks(), far.get_xticklabels(), strict=True)
    assert [label.get_text() for tick, label in labels if low <= tick <= high] == [
        "20M", "50M", "100M", "200M", "500M", "1B",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("high", "scale", "ticks"),
    [
        (4.99, "linear", []),
        (5, "log", ["1", "2", "5"]),
        (99, "log", ["1", "2", "5", "10", "20", "50", "100"]),
        (300, "log", ["1", "10", "100"]),
        (1000, "log", ["1", "10", "100", "1000"]),
    ],
)
def test_axis_of_amounts_has_ticks_for_its_range(high: float, scale: str, ticks: list[str]) -> None:
    axes = panel()
    drawing.amount_axis(axes, "bytes", [1.0, high])
    low, end = axes.get_xlim()
    assert low < 1 < high < end
    assert axes.get_xscale() == scale
    if ticks:
        axes.figure.draw_without_rendering()
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        assert [label.get_text() for tick, label in labels if low <= tick <= end] == ticks


@pytest.mark.parametrize(
    ("count", "options", "columns", "rows"),
    [
        (1, {}, 1, 1),
        (2, {}, 2, 1),
        (9, {}, 3, 3),
        (4, {}, 2, 2),
        (10, {}, 3, 4),
        (10, {"head": True}, 3, 4),
        (5, {"columns": 2}, 2, 3),
    ],
)
def test_panels_are_in_a_grid(count: int, options: dict[str, int], columns: int, rows: int) -> None:
    figure, panels = drawing.panel_grid(count, size=(2.0, 1.0), **options)  # type: ignore[arg-type]
    place = panels[-1].get_subplotspec()
    assert place is not None
    grid = place.get_topmost_subplotspec().get_gridspec()
    assert (len(panels), grid.ncols, grid.nrows) == (count, columns, rows)
    head = options.get("head", False)
    height = (rows - head) * 1.0 + 3.2 * head + 0.3
    assert figure.get_size_inches().tolist() == pytest.approx([max(2.0 * columns, 7.5 if head else 5.0), height])


def test_long_curves_have_no_markers_and_levels_have_dashes_of_their_own() -> None:
    axes = panel()
    for count in (99, 100):
        drawing.draw_points(axes, range(count), [0.0] * count)
    assert [line.get_marker() for line in artists(axes, "line")] == ["o", ""]
    for style in range(3):
        drawing.draw_level(axes, style, style=style)
    assert len({str(level._unscaled_dash_pattern) for level in artists(axes, "level")}) == 3  # type: ignore[attr-defined]


def test_text_of_a_mark_at_layer_zero_does_not_cover_the_axis() -> None:
    axes = panel()
    for layer in (0, 1):
        drawing.draw_mark(axes, layer, 1.0, "best")
    assert [text.get_horizontalalignment() for text in axes.texts] == ["left", "center"]


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), ("", b"\x89PNG")])
def test_suffix_selects_the_format_of_a_figure(suffix: str, start: bytes, tmp_path: Path) -> None:
    figure, _ = drawing.panel_grid(1)
    path = drawing.write_figure(figure, tmp_path / f"figure{suffix}")
    assert path.read_bytes().startswith(start)
    if suffix == ".png":
        with Image.open(path) as image:
            assert image.width == 150 * figure.get_size_inches()[0]


def test_names_are_not_parsed_as_formulas() -> None:
    figure, (axes,) = drawing.panel_grid(1)
    drawing.draw_points(axes, (0, 1), (0.0, 1.0), label="$\\frac$")
    drawing.set_title(axes, "$x^2")
    drawing.finish(figure).draw_without_rendering()
    assert axes.get_title(loc="left") == "$x^2"


def differences(layer_of: dict[int, int]) -> pl.DataFrame:
    rows = [
        ("a", model, base, layer, base / 2, "t", name, base + shift, base + shift - 1, base + shift + 2)
        for name in ("lidar", "dime")
        for shift, model in ((0.0, "b"), (10.0, "c"))
        for base, layer in layer_of.items()
    ]
    return pl.DataFrame(rows, schema=DIFFERENCES, orient="row")


def test_differences_are_ordered_by_depth() -> None:
    figure = plot_differences(differences({2: 2, 0: 0, 1: 1}))
    for axes in figure.axes:
        first, second = artists(axes, "line")
        assert (points(first), points(second)) == ([(0, 0), (1, 1), (2, 2)], [(0, 10), (1, 11), (2, 12)])
        assert [level.get_ydata()[0] for level in artists(axes, "level")] == [0]
        low, high = axes.get_ylim()
        assert low < -1 < 14 < high
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["b minus a", "c minus a"]


def test_models_of_different_depth_are_compared_by_relative_depth() -> None:
    axes = plot_differences(differences({0: 0, 1: 2, 2: 4})).axes[0]
    line = artists(axes, "line")[0]
    assert axes.get_xlabel() == "relative depth"
    assert list(line.get_xdata()) == [0, 0.5, 1]
