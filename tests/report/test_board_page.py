"""A board: the Pareto front, the selection under a budget, and the text of its page."""

import itertools
import random
import re
from collections.abc import Mapping
from html import unescape
from typing import Any

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.boards.sweep_board import Board, Point, Run, best_within, pareto_front
from tests.report.drawn_artists import artists, points, titles
from tests.report.made_runs import make_run

A = {"STS": [0.2, 0.6, 0.5]}
B = {"STS": [0.1, 0.3, 0.7]}
COSTS_A = {"parameters": {0: 10, 1: 20, 2: 30}, "milliseconds": {0: 0.1, 1: 1.0, 2: 2.0}, "bytes": 64}
COSTS_B = {"parameters": {0: 40, 1: 50, 2: 60}, "milliseconds": {0: 0.05, 1: 0.5, 2: 4.0}, "bytes": 32}


def make_two_runs(**notes: Any) -> list[Run]:
    return [make_run("a", A, **COSTS_A, **notes), make_run("b", B, **COSTS_B)]


def make_board(*runs: Run, budget: Mapping[Any, float] | None = None, remarks: tuple[str, ...] = ()) -> Board:
    return Board(runs, tuple(task.name for task in runs[0].summary.tasks), {}, budget or {}, remarks)


def table(page: str) -> list[list[str]]:
    """Return the cells of the rows of a page's only table."""
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", page)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_front_has_no_dominated_point() -> None:
    """A point is on the front unless another costs no more and scores no less."""
    rng = random.Random(0)
    for _ in range(50):
        points = [Point("r", k, float(rng.randint(0, 9)), {"bytes": rng.randint(1, 9)}) for k in range(12)]
        beaten = {
            point.layer
            for point, rival in itertools.permutations(points, 2)
            if rival.costs["bytes"] <= point.costs["bytes"]
            and rival.score >= point.score
            and (rival.costs, rival.score) != (point.costs, point.score)
        }
        expected = {(point.costs["bytes"], point.score) for point in points if point.layer not in beaten}
        front = pareto_front(points, "bytes")
        assert [(point.costs["bytes"], point.score) for point in front] == sorted(expected)
    assert pareto_front([Point("r", 0, 1.0, {})], "bytes") == []


def test_selection_is_the_best_layer_of_any_run_within_the_budget() -> None:
    points = [point for run in make_two_runs() for point in run.points]
    assert [
        (choice.run, choice.layer) for choice in (best_within(points, {}), best_within(points, {"parameters": 59}))
    ] == [("b", 2), ("a", 1)]
    best = best_within(points, {"parameters": 59, "milliseconds": 0.6})  # neither run's best layer
    assert (best.run, best.layer, best.score) == ("b", 1, pytest.approx(30))
    with pytest.raises(
        OptionError, match=r"none is within 5 parameters: the nearest is a at layer 0, 20\.0 points, 10 para"
    ):
        best_within(points, {"parameters": 5})
    assert best_within(points, {"parameters": 10}).layer == 0, "a cost equal to the budget is within it"
    points_without_costs = make_run("c", A).points
    with pytest.raises(OptionError, match="no run recorded ms per text: run the sweeps again"):
        best_within(points_without_costs, {"milliseconds": 5})
    assert (
        best_within([*points_without_costs, *points], {"bytes": 40}).run == "b"
    )  # an unknown cost is not within a budget


def test_equal_scores_are_resolved_by_fewer_parameters() -> None:
    points = [Point("large", 1, 5.0, {"parameters": 9}), Point("small", 1, 5.0, {"parameters": 3})]
    assert best_within(points, {}).run == "small"
    equal = [Point("m", layer, 5.0, {"parameters": 3}) for layer in (2, 1, 3)]
    assert best_within(equal, {}).layer == 1, "the lowest layer"


def test_nearest_layer_exceeds_its_worst_limit_the_least() -> None:
    points = [
        Point("far", 0, 9.0, {"parameters": 10, "bytes": 400}),
        Point("near", 1, 5.0, {"parameters": 20, "bytes": 300}),
        Point("near", 2, 6.0, {"parameters": 30, "bytes": 200}),  # 3 times the limit as well, and a higher score
    ]
    message = "none is within 10 parameters, 100 bytes per vector: the nearest is near at layer 2, 6.0 points, 30 param"
    with pytest.raises(OptionError, match=message):
        best_within(points, {"parameters": 10, "bytes": 100})


def test_chart_has_a_curve_a_disc_and_a_front_for_each_cost() -> None:
    figure = make_board(*make_two_runs(baselines={"TF-IDF": {"STS": 0.4}})).plot()
    assert titles(figure) == [
        "Score by parameters", "Score by ms per text", "Score by bytes per vector",
    ]  # fmt: skip
    for axes, curves in zip(figure.axes, (2, 2, 0), strict=True):  # all layers of a run have the same number of bytes
        assert len(artists(axes, "line")) == curves
        assert len(artists(axes, "dots")) == 2
    first = figure.axes[0]
    (front,) = artists(first, "front")
    assert front.get_drawstyle() == "steps-post"
    assert list(front.get_xdata()) == [10, 20, 60, first.get_xlim()[1]]
    assert list(front.get_ydata()) == pytest.approx([20, 60, 70, 70])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Pareto front", "TF-IDF 40.0", "a", "b"]
    assert points(artists(first, "dots")[-1]) == [(60, pytest.approx(70))]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_table_lists_score_gain_and_costs_of_each_best_layer_and_baselines() -> None:
    runs = make_two_runs(baselines={"TF-IDF": {"STS": 0.4}})
    older = make_run("older", B, parameters={0: 1, 1: 2, 2: 3}, milliseconds={1: 0.5})  # not for its best layer
    page = make_board(*runs, older).html()
    assert table(page) == [
        ["a", "folder", "1 of 2", "60.0", "+10.0 (no interval)", "20", "1", "–", "64"],
        ["b", "folder", "2 of 2", "70.0", "0.0", "60", "4", "–", "32"],
        ["older", "folder", "2 of 2", "70.0", "0.0", "3", "–", "–", "–"],
        ["TF-IDF", "", "", "40.0", "", "", "", "", ""],
    ]
    assert "<h1>Board of 3 runs</h1>" in page
    assert "Score against cost" in page
    assert "Score against cost" not in make_board(make_run("x", A)).html()


def test_page_names_the_best_encoder_its_costs_and_remarks() -> None:
    tasks = {"A": [0.2, 0.6, 0.5], "B": [0.9, 0.7, 0.1]}  # 55, 65 and 30 on average
    runs = make_run("a", tasks, **COSTS_A), make_run("b", {"A": [0.1], "B": [0.2]}, bytes=8)
    page = make_board(*runs, remarks=("Left out: C.",)).html()
    assert "a at layer 1 scores 65.0 on average over 2 tasks, the highest of 2 runs." in page
    assert "Its costs: 20 parameters, 1 ms per text, 64 bytes per vector." in page
    assert "<p>Left out: C.</p>" in page
    assert "the highest within 45 parameters" in make_board(*make_two_runs(), budget={"parameters": 45}).html()
