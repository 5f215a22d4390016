from __future__ import annotations

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA
from midlayer_encoders.paper.renyi_orders import order_entropies
from midlayer_encoders.paper.theorems import STATEMENTS, check_theorems
from midlayer_encoders.report.charts import Line, Panel
from midlayer_encoders.report.paper_page import (
    Finding,
    along_panels,
    curves_panel,
    experiments_html,
    metric_depth_panels,
    order_panels,
    panels_chart,
    panels_figure,
    prompt_panels,
    rule_panels,
    score_panels,
    subblock_panels,
    theorem_panels,
)
from midlayer_encoders.report.style import css_colors
from tests.report.made_frames import rows_frame


def extra_frame(rows: list[tuple[object, ...]], **extra: pl.DataType) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={**FRAME_SCHEMA, **extra}, orient="row")


def test_scores_by_depth_average_the_layers_that_have_every_task() -> None:
    rows = [("m", "main", k, k / 2, "score", "a", "s", v) for k, v in enumerate([0.1, 0.3, 0.2])]
    rows += [("m", "main", k, k / 2, "score", "b", "s", v) for k, v in enumerate([0.3, 0.5])]  # not the last layer
    (panel,) = score_panels(rows_frame(rows))
    (line,) = panel.lines
    assert (line.label, line.x, line.y) == ("m (2 tasks)", (0.0, 50.0), (pytest.approx(20), pytest.approx(40)))
    with pytest.raises(OptionError, match="rows of kind 'score'"):
        score_panels(rows_frame([]))


def test_models_of_different_depth_share_an_axis_of_depth() -> None:
    rows = [
        (m, "main", k, k / n, "metric", "t", "lidar", float(k)) for m, n in (("a", 2), ("b", 4)) for k in range(n + 1)
    ]
    (panel,) = metric_depth_panels(rows_frame(rows))
    assert [line.x[-1] for line in panel.lines] == [1, 1]
    (alone,) = metric_depth_panels(rows_frame(rows[:3]))
    assert (alone.x.label, alone.lines[0].x) == ("layer", (0, 1, 2))


def test_along_leaves_out_positions_that_few_texts_reach() -> None:
    extra = {"position": pl.Int64(), "deviation": pl.Float64(), "texts": pl.Int64()}
    rows = [
        ("m", "main", k, k / 4, "metric", "t", "prompt_entropy", 1.0 * position, position, 0.5, count)
        for k in range(5)
        for position, count in ((4, 10), (8, 10), (12, 5), (16, 4))
    ]
    panels = along_panels(extra_frame(rows, **extra))
    assert [panel.title for panel in panels][:2] == ["layer 1, 25 % of the depth", "layer 2, 50 % of the depth"]
    assert panels[0].lines[0].label == "m"
    assert panels[0].lines[0].x == (4, 8, 12)
    assert panels[0].lines[0].band[0] == (3.5, 4.5)


def test_prompts_and_sites_are_curves_of_their_own() -> None:
    extra = {"condition": pl.String(), "amount": pl.Float64()}
    rows = [
        ("m", "main", k, k / 2, "metric", "t", "prompt_entropy", k * amount, condition, amount)
        for condition in ("length", "repetition")
        for amount in (8.0, 2.0)
        for k in range(3)
    ]
    panels = prompt_panels(extra_frame(rows, **extra))
    assert [line.label for line in panels[0].lines] == ["2 tokens", "8 tokens"]
    assert [line.label for line in panels[1].lines] == ["p = 2", "p = 8"]
    assert all(panel.ordered for panel in panels)
    sites = [
        ("m", "main", k, k / 2, "metric", "t", "x", 1.0, site) for site in ("residual_in", "mlp_in") for k in (1, 2)
    ]
    (panel,) = subblock_panels(extra_frame(sites, site=pl.String()))
    assert [line.label for line in panel.lines] == ["mlp in"]


def test_figures_draw_what_the_panels_hold() -> None:
    panels = order_panels(order_entropies([1.0, 2.0], [0.0, 1.0], size=4))
    figure = panels_figure(panels, title="orders")
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert len(figure.legends) == 1
    banded = Line((0, 1), (0.0, 1.0), "x", band=((0, 1), (0, 2)))
    other = panels_figure([panels[0], curves_panel("one", "layer", [banded])])
    assert not other.legends
    assert other.axes[1].collections  # the band
    with pytest.raises(OptionError, match="`panels` must hold curves"):
        panels_figure([])
    rows = [
        ("m", "main", 1, 0.5, "score", task, rule, v) for task in "ab" for rule, v in (("best", 0.6), ("last", 0.4))
    ]
    assert panels_figure(rule_panels(rows_frame(rows))).axes[0].lines[0].get_xdata().tolist() == pytest.approx([60, 40])
    theorems = check_theorems(draws=100, width=16)
    texts = [text.get_text() for text in panels_figure(theorem_panels(theorems, STATEMENTS)).axes[0].texts]
    assert texts[:2] == ["holds in 0 of 100", "holds in 100 of 100"]


def test_the_page_escapes_what_it_is_given_and_colors_ordered_curves() -> None:
    lines = [Line((0, 1), (0.0, 1.0), "p = 0 & 1"), Line((0, 1), (0.0, 2.0), "p = 1")]
    panel = curves_panel("<b>", "layer", lines, ordered=True)
    found = Finding("fig6", "<i>", "claims <x>", ("came <y>",), (panel,), (("rule", "m<"), ("last", "1.0")))
    page = experiments_html([found], title="T<", how={"seed": "<0>"}, notes=["fig5 was left out: <z>"])
    for tag in ("<b>", "<i>", "<x>", "<y>", "<z>", "<0>", "m<<"):
        assert tag not in page
    assert all(color in page for color in css_colors(2).values() if color.startswith("light-dark"))
    assert "p = 0 &amp; 1" in page
    assert "<td>1.0</td>" in page


def test_a_side_below_zero_is_counted_but_has_no_place_on_the_logarithmic_axis() -> None:
    sides = {0: (2.0, 1.0, False), 1: (0.5, 1.0, True), 2: (-3.0, 1.0, True), 3: (1.0, 0.0, False)}
    rows = [
        {"statement": "s", "draw": draw, "holds": holds, "name": name, "value": value}
        for draw, (left, right, holds) in sides.items()
        for name, value in (("left", left), ("right", right))
    ]
    (panel,) = theorem_panels(pl.DataFrame(rows), {"s": "left <= right"})
    (axes,) = panels_figure([panel]).axes
    assert [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "|"] == [[0.5], [2.0]]
    assert [text.get_text() for text in axes.texts] == ["holds in 2 of 4"]
    page = experiments_html([Finding("theorems", "t", "c", ("w",), (panel,))], title="T", how={})
    assert page.count("M 0 5.5 L 0 -5.5") == 2
    assert "holds in 2 of 4" in page


def test_rules_are_on_the_page_with_their_distance_from_the_last_layer() -> None:
    scores = (("best", 0.6), ("last", 0.4), ("min-dime", 0.3))
    away = {"a": -0.2, "b": -0.1, "c": 0.3}  # from the mean, which is not the median
    rows = [("m", "main", 1, 0.5, "score", task, rule, v + by) for task, by in away.items() for rule, v in scores]
    rules = rule_panels(rows_frame(rows))
    page = experiments_html([Finding("table2", "t", "c", ("w",), tuple(rules))], title="T", how={})
    for text in ("best: 60.0", "last: 40.0", "min-dime: 30.0", "the line is the last layer"):
        assert text in page
    assert rules[0].parts[0].spans == tuple(pytest.approx(ends) for ends in ((40, 60), (40, 40), (30, 40)))  # type: ignore[union-attr]


def test_a_label_has_one_style_in_all_panels_and_none_alone_has_a_key() -> None:
    def panel(title: str, *labels: str) -> Panel:
        return curves_panel(title, "layer", [Line((0, 1), (0.0, 1.0), label) for label in labels])

    chart = panels_chart([panel("one", "a", "b"), panel("two", "b", "c")])
    assert [[(line.label, line.style) for line in one.lines] for one in chart.panels] == [
        [("a", 0), ("b", 1)],
        [("b", 1), ("c", 2)],
    ]
    assert list(chart.key) == ["a", "b", "c"]
    assert not panels_chart([panel("one", "a"), panel("two", "a")]).key
