from __future__ import annotations

import polars as pl
import pytest
from matplotlib.colors import to_hex

from benchmarks.paper.charts import (
    LabeledCurve,
    plot_along,
    plot_curves,
    plot_entropies,
    plot_orders,
    plot_prompts,
    plot_rules,
    plot_subblocks,
    score_curves,
)
from benchmarks.paper.reproduce import TEMPLATE
from benchmarks.paper.token_experiments import order_entropies
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.style import ordered_colors
from tests.report.drawn_artists import artists, points, titles
from tests.report.made_frames import rows_frame


def extra_frame(rows: list[tuple[object, ...]], **extra: pl.DataType) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={**FRAME_SCHEMA, **extra}, orient="row")


def test_scores_by_depth_average_the_layers_with_every_task() -> None:
    rows = [("m", "main", k, k / 2, "score", "a", "s", v) for k, v in enumerate([0.1, 0.3, 0.2])]
    rows += [("m", "main", k, k / 2, "score", "b", "s", v) for k, v in enumerate([0.3, 0.5])]  # not the last layer
    (curve,) = score_curves(rows_frame(rows))
    assert (curve.label, curve.x, curve.y) == ("m (2 tasks)", [0.0, 50.0], [pytest.approx(20), pytest.approx(40)])
    with pytest.raises(OptionError, match="rows of kind 'score'"):
        score_curves(rows_frame([]))


def test_entropies_of_all_models_share_two_panels() -> None:
    names = ("dataset_entropy", "prompt_entropy", "lidar")
    rows = [("m", "main", k, k / 2, "metric", "texts", name, 1.0) for name in names for k in range(3)]
    rows += [("p", "main", k, k / 4, "metric", "texts", name, 1.0) for name in names for k in range(5)]
    figure = plot_entropies(rows_frame(rows))
    assert titles(figure) == ["prompt_entropy", "dataset_entropy"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["m", "p"]


def test_positions_reached_by_few_texts_are_left_out() -> None:
    extra = {"position": pl.Int64(), "deviation": pl.Float64(), "texts": pl.Int64()}
    rows = [
        ("m", "main", k, k / 4, "metric", "t", "prompt_entropy", 1.0 * position, position, 0.5, count)
        for k in range(5)
        for position, count in ((4, 10), (8, 10), (12, 5), (16, 4))
    ]
    figure = plot_along(extra_frame(rows, **extra))
    assert titles(figure)[:2] == ["layer 1, 25 % of the depth", "layer 2, 50 % of the depth"]
    first = figure.axes[0]
    assert points(artists(first, "line")[0]) == [(4, 4), (8, 8), (12, 12)]
    corners = first.collections[0].get_paths()[0].vertices.tolist()
    assert [4, 3.5] in corners
    assert [4, 4.5] in corners


def test_prompts_and_sites_have_their_own_curves() -> None:
    extra = {"condition": pl.String(), "amount": pl.Float64()}
    rows = [
        ("m", "main", k, k / 2, "metric", "t", "prompt_entropy", k * amount, condition, amount)
        for condition in ("length", "repetition")
        for amount in (8.0, 2.0)
        for k in range(3)
    ]
    first, second = plot_prompts(extra_frame(rows, **extra)).axes
    assert [line.get_label() for line in artists(first, "line")] == ["2 tokens", "8 tokens"]
    assert [line.get_label() for line in artists(second, "line")] == ["p = 2", "p = 8"]
    colors = [to_hex(line.get_color()) for axes in (first, second) for line in artists(axes, "line")]
    assert colors == list(ordered_colors(4))
    sites = [
        ("m", "main", k, k / 2, "metric", "t", "x", 1.0, site) for site in ("residual_in", "mlp_in") for k in (1, 2)
    ]
    (axes,) = plot_subblocks(extra_frame(sites, site=pl.String())).axes
    assert [points(line) for line in artists(axes, "line")] == [[(1, 1), (2, 1)]]


def test_figures_draw_their_panels() -> None:
    figure = plot_orders(order_entropies([1.0, 2.0], [0.0, 1.0], size=4))
    assert [len(axes.lines) for axes in figure.axes] == [2, 2]
    assert len(figure.legends) == 1
    with pytest.raises(OptionError, match="`panels` must hold curves"):
        plot_curves({}, "layer")
    rows = [
        ("m", "main", 1, 0.5, "score", task, rule, v) for task in "ab" for rule, v in (("best", 0.6), ("last", 0.4))
    ]
    assert plot_rules(rows_frame(rows)).axes[0].lines[0].get_xdata().tolist() == pytest.approx([60, 40])


def test_page_escapes_its_texts_and_colors_ordered_curves() -> None:
    curves = [LabeledCurve("p = 0 & 1", (0, 1), (0.0, 1.0)), LabeledCurve("p = 1", (0, 1), (0.0, 2.0))]
    figure = plot_curves({"<b>": curves}, "layer", ordered=True)
    section = {"name": "fig6", "title": "<i>", "claim": "claims <x>", "findings": ["<y>"], "figure": figure}
    section["table"] = (("rule", "m<"), ("last", "1.0"))
    notes = ["fig5 was left out: <z>"]
    page = render(TEMPLATE, sections=[section], title="T<", how={"seed": "<0>"}, notes=notes)
    for tag in ("<b>", "<i>", "<x>", "<y>", "<z>", "<0>", "m<<"):
        assert tag not in page
    assert [to_hex(line.get_color()) for line in figure.axes[0].lines] == list(ordered_colors(2))
    assert "<td>1.0</td>" in page


def test_rules_show_their_distance_from_the_last_layer() -> None:
    scores = (("best", 0.6), ("last", 0.4), ("min-dime", 0.3))
    task_offsets = {"a": -0.2, "b": -0.1, "c": 0.3}  # from the mean, which differs from the median
    rows = [
        ("m", "main", 1, 0.5, "score", task, rule, v + task_offset)
        for task, task_offset in task_offsets.items()
        for rule, v in scores
    ]
    figure = plot_rules(rows_frame(rows))
    spans = figure.axes[0].collections[0].get_segments()
    assert [[x for x, _ in span] for span in spans] == [pytest.approx(ends) for ends in ([40, 60], [40, 40], [40, 30])]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["best", "last", "min-dime"]
    assert "the line is the last layer" in figure.axes[0].get_xlabel()


def test_labels_have_one_style_in_all_panels_and_a_single_label_has_no_legend() -> None:
    def curves(*labels: str) -> list[LabeledCurve]:
        return [LabeledCurve(label, (0, 1), (0.0, 1.0)) for label in labels]

    figure = plot_curves({"one": curves("a", "b"), "two": curves("b", "c")}, "layer")
    first, second = ([line.get_color() for line in artists(axes, "line")] for axes in figure.axes)
    assert first[1] == second[0]
    assert len({*first, *second}) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert not plot_curves({"one": curves("a"), "two": curves("a")}, "layer").legends


def test_panels_name_the_layers_of_models_of_different_depth() -> None:
    extra = {"position": pl.Int64(), "deviation": pl.Float64(), "texts": pl.Int64()}
    rows = [
        (model, revision, k, k / depth, "metric", "t", "prompt_entropy", 1.0, 4, 0.5, 10)
        for model, revision, depth in (("a", "main", 4), ("b", "step1", 8), ("b", "step2", 8))
        for k in range(depth + 1)
    ]
    figure = plot_along(extra_frame(rows, **extra))
    pairs = {"1 and 2": 25, "2 and 4": 50, "3 and 6": 75, "4 and 8": 100}
    assert titles(figure) == [f"layers {pair}, {percent} % of the depth" for pair, percent in pairs.items()]
    assert [line.get_label() for line in artists(figure.axes[0], "line")] == ["a", "b step1", "b step2"]
    assert figure.axes[0].get_subplotspec().get_gridspec().ncols == 2  # type: ignore[union-attr]
    assert titles(plot_along(extra_frame(rows[:5], **extra), depths=(0.7,))) == ["layer 3, 70 % of the depth"]


def test_panels_of_several_models_name_them() -> None:
    conditions = ("repetition", "resampling", "randomness", "length", "another")
    rows = [
        (model, "main", 0, 0.0, "metric", "t", "prompt_entropy", 1.0, condition, 2.0)
        for model in ("m", "n")
        for condition in conditions
    ]
    frame = extra_frame(rows, condition=pl.String(), amount=pl.Float64())
    names = [
        "repetition: tokens become one token of the text",
        "resampling: tokens become others of the text",
        "randomness: tokens become any of the vocabulary",
        "length: the first n tokens, nats",
        "another",
    ]
    assert titles(plot_prompts(frame.filter(model="m"))) == names
    assert titles(plot_prompts(frame)) == [f"{name} ({model})" for model in ("m", "n") for name in names]
    sites = [(model, "main", 1, 0.5, "metric", "t", "x", 1.0, "mlp_in") for model in ("m", "n")]
    assert titles(plot_subblocks(extra_frame(sites, site=pl.String()))) == ["x (m)", "x (n)"]
    scores = [("m", revision, 0, 0.0, "score", "a", "s", 0.5) for revision in ("step1", "step2")]
    assert [curve.label for curve in score_curves(rows_frame(scores))] == ["m step1 (1 task)", "m step2 (1 task)"]
