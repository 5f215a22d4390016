"""A board: the Pareto front, the selection under a budget, and the text of its page."""

from __future__ import annotations

import itertools
import math
import random
import re
from html import unescape

import pytest
from matplotlib.colors import to_hex

from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.boards.board_page import board_html, plot_board
from midlayer_encoders.extras.boards.runs import Point, Run, best_within, fronts_by_run, pareto_front
from midlayer_encoders.report.style import SERIES
from tests.report.drawn_artists import artists, details, points, titles
from tests.report.made_runs import make_run

A = {"STS": [0.2, 0.6, 0.5]}
B = {"STS": [0.1, 0.3, 0.7]}
COSTS_A = {"parameters": {0: 10, 1: 20, 2: 30}, "milliseconds": {0: 0.1, 1: 1.0, 2: 2.0}, "bytes": 64}
COSTS_B = {"parameters": {0: 40, 1: 50, 2: 60}, "milliseconds": {0: 0.05, 1: 0.5, 2: 4.0}, "bytes": 32}


def make_two_runs() -> list[Run]:
    return [make_run("a", A, **COSTS_A), make_run("b", B, **COSTS_B)]


def page_html(runs: list[Run], **options: object) -> str:
    best = max((run.best for run in runs), key=lambda point: point.score)
    return board_html(runs, **{"best": best, "lines": {"Python": "make()"}, **options})  # type: ignore[arg-type]


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
    with pytest.raises(OptionError, match="no run recorded milliseconds per text: run the sweeps again"):
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
    figure = plot_board(make_two_runs(), {"TF-IDF": {"STS": 0.4}}, {"parameters": 45})
    assert titles(figure) == [
        "Score by parameters", "Score by milliseconds per text", "Score by bytes per vector",
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
    assert details(artists(first, "dots")[-1])["tips"] == [
        "b, layer 2: 70.0 points\n60 parameters, 4 ms per text, 32 bytes per vector"
    ]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_run_without_a_cost_has_a_dash_and_is_not_in_its_panel() -> None:
    older = make_run("older", B, parameters={0: 1, 1: 2, 2: 3}, milliseconds={1: 0.5})  # not for its best layer
    page = page_html([make_run("a", A, **COSTS_A), older])
    row = re.search(r'<tr><th scope="row" data-value="older".*?</tr>', page)
    assert row is not None
    assert re.findall(r"<td[^>]*>(.*?)</td>", row[0])[3:6] == ["3", "–", "–"]
    assert "Score against cost" not in page_html([make_run("x", A)])


def test_table_lists_score_cost_and_fronts_of_each_best_layer() -> None:
    runs = make_two_runs()
    assert fronts_by_run(runs) == {"a": ["parameters", "milliseconds"], "b": ["parameters", "milliseconds", "bytes"]}
    page = page_html(runs, baselines={"TF-IDF": {"STS": 0.4}})
    rows = re.findall(r'<tr><th scope="row" data-value=.*?</tr>', page)
    cells = [[unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<td.*?</td>", row)] for row in rows]
    assert cells == [
        ["1 of 2", "60.0", "+10.0 (no interval)", "20", "1", "64", "parameters, time"],
        ["2 of 2", "70.0", "0.0", "60", "4", "32", "parameters, time, bytes"],
    ]
    assert "b at layer 2 scores 70.0 on STS, the highest of 2 runs." in page
    assert '<tr><th scope="row">TF-IDF</th><td></td><td>40.0</td>' in page
    assert "within 45 parameters" in page_html(runs, best=runs[0].best, budget={"parameters": 45.0})


def test_rows_link_to_the_page_of_the_sweep() -> None:
    page = page_html([make_run("a", A, page="./a%22b/report.html", **COSTS_A)])
    assert page.count('<a href="./a%22b/report.html">') == 1
    assert "<a href" not in page_html([make_run("a", A, **COSTS_A)])


def test_single_run_is_compared_with_its_layers() -> None:
    assert "the highest of its layers" in page_html([make_run("a", A, **COSTS_A)])
    assert math.isclose(make_run("a", A).average.gain, 10)


def test_budget_and_its_encoder_are_drawn_in_the_panels_of_their_costs() -> None:
    runs = make_two_runs()
    figure = plot_board(runs, None, {"parameters": 600}, runs[1].best)
    first, second, _ = figure.axes
    assert [list(rule.get_xdata()) for rule in artists(first, "rule")] == [[600, 600]]
    assert first.get_xlim()[1] > 600, "the budget is on the axis even if every layer is far below it"
    assert not artists(second, "rule")
    marks = [points(mark) for axes in figure.axes for mark in artists(axes, "mark")]
    assert marks == [[(cost, pytest.approx(70))] for cost in (60, 4, 32)]
    for kind in ("line", "dots"):
        assert [to_hex(artist.get_color()) for artist in artists(first, kind)] == list(SERIES[:2])
    assert page_html(runs, best=runs[0].best, budget={"parameters": 45.0}).count('class="mark"') == 3
    assert 'class="mark"' not in page_html(runs)


def test_page_states_costs_notes_and_each_task_at_the_best_layer_on_average() -> None:
    tasks = {"A": [0.2, 0.6, 0.5], "B": [0.9, 0.7, 0.1]}  # 55, 65 and 30 on average
    runs = [make_run("b", {"A": [0.1], "B": [0.2]}, bytes=8), make_run("a", tasks, **COSTS_A)]
    page = page_html(runs, notes=["Left out: C."], baselines={"TF-IDF": {"A": 0.4, "B": 0.3}})
    assert "<h1>Board of 2 runs</h1>" in page
    assert "<title>Board of 1 run</title>" in page_html(runs[:1])
    assert "<p>20 parameters, 1 ms per text, 64 bytes per vector</p>" in page
    assert "<p>Left out: C.</p>" in page
    (row,) = re.findall(r'<tr><th scope="row" data-value="a".*?</tr>', page)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row)[-2:] == ["60.0", "70.0"]
    feet = re.findall(r"<tfoot>.*?</tfoot>", page)
    assert [re.findall(r"<td>(.+?)</td>", foot.replace("<td></td>", "")) for foot in feet] == [["35.0", "40.0", "30.0"]]
    assert "average over 2 tasks, the highest of 2 runs" in page


@pytest.mark.parametrize(("count", "shown"), [(1, False), (2, True), (6, True), (7, False)])
def test_tasks_have_columns_if_they_are_few(count: int, shown: bool) -> None:
    page = page_html([make_run("a", {f"task{k}": [0.1, 0.2] for k in range(count)})])
    assert (">task0</th>" in page) is shown
