"""Boards from folders of sweeps: what is compared, what is left out, the Pareto front, the budget and the page."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder, board
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.boards.sweep_board import COSTS, best_within, cost_text, pareto_front
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.sweeping import SweepResult
from tests.report.drawn_artists import artists, points, titles
from tests.report.made_runs import make_sweep

ONE = {"STS": [0.2, 0.6, 0.5], "Own-0a1b2c3d": [0.4, 0.2, 0.3]}
OTHER = {"STS": [0.1, 0.3, 0.7], "Else": [0.9, 0.9, 0.9]}


def point_rows(*rows: tuple[str, int, float, dict[str, float]]) -> pl.DataFrame:
    """Return a frame of points: run, layer, score and costs."""
    cells = [
        {"run": run, "layer": layer, "score": score} | {cost: costs.get(cost) for cost in COSTS}
        for run, layer, score, costs in rows
    ]
    return pl.DataFrame(cells, schema_overrides=dict.fromkeys(COSTS, pl.Float64))


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    """Sweeps of two models whose layers have different costs."""
    costs: dict[str, dict[str, Any]] = {
        "a": {"parameters": {0: 10, 1: 20, 2: 30}, "seconds": {0: 0.1, 1: 1.0, 2: 2.0}, "dimensions": 16},
        "b": {"parameters": {0: 40, 1: 50, 2: 60}, "seconds": {0: 0.05, 1: 0.5, 2: 4.0}, "dimensions": 8},
    }
    for name, scores in {"a": [0.2, 0.6, 0.5], "b": [0.1, 0.3, 0.7]}.items():
        timing = {"texts": 1000, "device": "cpu"}
        make_sweep(tmp_path / name, {"STS": scores}, model=name, tokens={}, timing=timing, **costs[name])
    return tmp_path


def test_only_tasks_that_all_runs_share_are_compared(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", ONE, model="m1")
    make_sweep(tmp_path / "other", OTHER, model="m2")
    actual = board([tmp_path / "one", tmp_path / "other"])
    assert actual.tasks == ("STS",)
    assert repr(actual) == "<Board: ['m2', 'm1'], tasks=['STS']>"
    assert actual.to_frame().filter("best").select("run", "layer", "score").rows() == [
        ("m2", 2, pytest.approx(70)),
        ("m1", 1, pytest.approx(60)),
    ]
    assert actual.left_out == {"Else": ("m1",), "Own": ("m2",)}
    assert set(actual.remarks) == {"Left out: Else, not in m1.", "Left out: Own, not in m2."}
    assert actual.chosen().costs == {"parameters": 120, "milliseconds": pytest.approx(3.0), "tokens": 9.5, "bytes": 32}


def test_runs_are_ranked_by_their_best_layer_not_their_last(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", {"STS": [0.2, 0.9, 0.1]}, model="m1")
    make_sweep(tmp_path / "other", {"STS": [0.1, 0.3, 0.7]}, model="m2")
    assert [run.name for run in board([tmp_path / "other", tmp_path / "one"]).runs] == ["m1", "m2"]


def test_a_folder_that_holds_several_is_searched_and_says_what_it_left_out(tmp_path: Path) -> None:
    make_sweep(tmp_path / "a" / "deep", ONE, model="m1")
    make_sweep(tmp_path / "b", ONE, model="m2")
    make_sweep(tmp_path / "broken", ONE)
    (tmp_path / "broken/sweep.json").write_text("{")
    make_sweep(tmp_path / "unscored", {"STS": [float("nan")]})
    (tmp_path / "notes").mkdir()
    actual = board(tmp_path)
    assert [run.name for run in actual.runs] == ["m1", "m2"]
    damaged, unscored = actual.remarks
    assert f"{tmp_path / 'broken'} has no readable frame.parquet and sweep.json. Run the sweep again" in damaged
    assert unscored.startswith(f"Left out: {tmp_path / 'unscored'} has no scores, only metrics or failed tasks.")
    repeated = board([tmp_path, tmp_path / "b", tmp_path / "a" / ".." / "b"])  # the same folder by another name
    assert [run.name for run in repeated.runs] == ["m1", "m2"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "`runs` must be folders of finished sweeps, but .*nothing holds none: pass the --out"),
        ("half", "but .*half holds none: pass the --out of .* The same command again resumes an unfinished one"),
        ("unscored", "must hold sweeps with scores, but got none. Left out: .*unscored has no scores"),
        ("broken", "but .*broken has no readable frame.parquet and sweep.json. Run the sweep again"),
    ],
)
def test_what_is_no_finished_sweep_of_scores_is_refused(case: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "midlayer.lock").touch()
    make_sweep(tmp_path / "unscored", {"STS": [float("nan")]})
    make_sweep(tmp_path / "broken", ONE)
    (tmp_path / "broken/sweep.json").write_text("{")
    with pytest.raises(OptionError, match=message):
        board([tmp_path / case])


def test_runs_that_share_no_task_are_refused(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", {"A": [0.1, 0.2]}, model="m1")
    make_sweep(tmp_path / "two", {"B": [0.1, 0.2]}, model="m2")
    with pytest.raises(OptionError, match=r"share none \(m1: A; m2: B\)\. Sweep them on the same tasks"):
        board(tmp_path)
    with pytest.raises(OptionError, match="`runs` must hold at least one folder"):
        board([])
    for name, most in (("max_parameters", 0), ("max_milliseconds", -1), ("max_bytes", float("nan"))):
        with pytest.raises(OptionError, match=f"`{name}` must be"):
            board(tmp_path / "one", **{name: most})  # type: ignore[arg-type]


def test_models_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("x/last", "y/last"):
        make_sweep(tmp_path / name, ONE, how={"weights": name, "dtype": "float32"})
    make_sweep(tmp_path / "step", ONE, revision="step8")
    names = {run.name for run in board(tmp_path).runs}
    assert names == {"m", f"m ({tmp_path / 'y/last'})", "m@step8"}


def test_each_recipe_of_a_sweep_is_a_run_with_lines_of_its_own(tmp_path: Path) -> None:
    scores = {"plain": {"STS": [0.2, 0.6, 0.5]}, "one-word": {"STS": [0.1, 0.3, 0.7]}}
    parts = {
        name: make_sweep(tmp_path / "both/recipes" / name, values, options={"recipe": name})
        for name, values in scores.items()
    }
    SweepResult.of(parts, tmp_path / "both").save()
    actual = board(tmp_path, max_parameters=115)
    assert [run.name for run in actual.runs] == ["m with one-word", "m"]
    assert (
        board(tmp_path).lines(board(tmp_path).chosen())["shell"]
        == "midlayer export m --layer 2 --recipe one-word --out layer-2"
    )
    assert (actual.chosen().run, actual.chosen().layer) == ("m", 1)
    make_sweep(tmp_path / "plain again", scores["plain"])
    names = [run.name for run in board([tmp_path / "both", tmp_path / "plain again"]).runs]
    assert names == ["m with one-word", "m", f"m ({tmp_path / 'plain again'})"]


def test_best_layer_of_a_board_is_that_within_the_budget(tmp_path: Path) -> None:
    one = make_sweep(tmp_path / "one", {"STS": [0.2, 0.6, 0.5], "Own-0a1b2c3d": [0.4, 0.2, 0.3]}, model="m1")
    other = {"STS": [0.1, 0.3, 0.7], "Own-0a1b2c3d": [0.1, 0.1, 0.2]}
    make_sweep(tmp_path / "other", other, model="m2", options={"recipe": "echo"})
    actual = board(tmp_path)
    best = actual.best("STS")
    assert (best.layer, best.model, best.recipe, best.score) == (2, "m2", "echo", pytest.approx(70))
    assert (actual.best("Own"), actual.best("Own").model) == (0, "m1")
    assert (actual.best(), actual.best().score, actual.best().gain.points) == (2, pytest.approx(45), 0)
    small = board(tmp_path, max_parameters=115)
    assert (small.best("STS"), small.best("STS").model) == (1, "m1")
    assert small.best().layer == small.chosen().layer
    with pytest.raises(OptionError, match="`task` must be one of"):
        actual.best("Else")
    assert set(actual.frame["run"]) == {"m1", "m2 with echo"}
    own = actual.frame.filter(run="m1").sort("layer").filter(dataset="Own")
    assert own["value"].to_list() == [0.4, 0.2, 0.3]
    assert len(actual.to_pandas()) == len(actual.scores) == 12
    assert one.best("STS").gain.without == ("STS",)


def test_encoder_of_a_board_is_that_of_the_best_run(tiny_folder: Callable[[str], str], tmp_path: Path) -> None:
    for family, scores in (("Llama", [0.1, 0.2, 0.5, 0.4, 0.3]), ("BERT", [0.1, 0.2, 0.1, 0.4, 0.3])):
        folder = tiny_folder(family)
        result = make_sweep(tmp_path / family, {"STS": scores}, model=f"local/{Path(folder).name}")
        replace(result, notes=replace(result.notes, model=folder)).save()
    encoder = board(tmp_path).encoder("STS", device="cpu")
    assert encoder.spec == LayerEncoder(tiny_folder("Llama"), 2, device="cpu").spec


def test_older_runs_have_dashes(tmp_path: Path) -> None:
    make_sweep(tmp_path / "new", ONE, model="m1")
    make_sweep(tmp_path / "old", ONE, model="m2", timing={}, dimensions=0, tokens={}, seconds={2: 0.016})
    actual = board(tmp_path)
    assert actual.to_frame().filter(run="m2", layer=2)["milliseconds"].item() == pytest.approx(1.0)  # of 16 texts
    assert actual.to_frame()["bytes"].to_list() == [32.0] * 3 + [None] * 3
    assert actual.table()[2] == ["m2", "1", "40.0", "110", "–", "–", "–"]


def test_page_shows_every_run_although_the_budget_is_not_met(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", ONE, model="m1")
    make_sweep(tmp_path / "two", {"STS": [0.1, 0.2, 0.3]}, model="m2")
    page = board(tmp_path, max_bytes=1).html()
    assert "none is within 1 bytes per vector: the nearest is m1 at layer 1" in page
    assert "m1 at layer 1 scores 60.0 on STS, the highest of 2 runs." in page
    assert "<h1>Board of 2 runs</h1>" in page
    assert "Score against cost" in page
    assert "<p>Left out: Own, not in m2.</p>" in page
    none: dict[str, Any] = {"parameters": {}, "seconds": {}, "dimensions": 0, "tokens": {}}
    make_sweep(tmp_path / "bare/three", ONE, model="m3", **none)
    assert "Score against cost" not in board(tmp_path / "bare").html()


def test_frame_and_dictionary_hold_every_layer_and_the_best_one(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", {"STS": [0.2, 0.6, 0.5]}, model="m1")
    make_sweep(tmp_path / "two", {"STS": [0.125, 0.25]}, model="m2")
    actual = board(tmp_path, max_parameters=105)
    assert actual.to_frame().rows() == [
        ("m1", 0, 20.0, False, 100.0, 1.0, 9.5, 32.0),
        ("m1", 1, 60.0, True, 110.0, 2.0, 9.5, 32.0),
        ("m1", 2, 50.0, False, 120.0, 3.0, 9.5, 32.0),
        ("m2", 0, 12.5, False, 100.0, 1.0, 9.5, 32.0),
        ("m2", 1, 25.0, True, 110.0, 2.0, 9.5, 32.0),
    ]
    assert actual.to_frame().columns == ["run", "layer", "score", "best", *COSTS]
    values = actual.to_dict()
    assert {name: values[name] for name in ("tasks", "left_out", "remarks", "budget")} == {
        "tasks": ("STS",), "left_out": {}, "remarks": (), "budget": {"parameters": 105},
    }  # fmt: skip
    assert [(run["run"], run["layer"], run["score"]) for run in values["runs"]] == [("m1", 1, 60.0), ("m2", 1, 25.0)]
    assert actual.table() == [
        ["run", "layer", "score", "parameters", "ms per text", "tokens per text", "bytes per vector"],
        ["m1", "1", "60.0", "110", "2", "9.5", "32"],
        ["m2", "1", "25.0", "110", "2", "9.5", "32"],
    ]


def test_tokens_are_those_of_the_shared_tasks_and_on_the_page(tmp_path: Path) -> None:
    scores = {"STS": [0.2, 0.6], "Own": [0.2, 0.6], "Else": [0.2, 0.6]}
    tokens = {"STS": 10.0, "Own": 25.0, "Else": 400.0}
    make_sweep(tmp_path / "one", scores, model="m1", tokens=tokens)
    make_sweep(tmp_path / "two", {"STS": [0.2, 0.5], "Own": [0.2, 0.5]}, model="m2", tokens={"STS": 30.0})
    actual = board(tmp_path)
    assert actual.to_frame().filter(layer=1)["tokens"].to_list() == [17.5, 30.0]
    assert [run["tokens"] for run in actual.to_dict()["runs"]] == [17.5, 30.0]
    page = actual.html()
    assert all(f"<td>{value}</td>" in page for value in ("17.5", "30"))
    assert "17.5 tokens per text" in page


def test_sweeps_are_found_four_folders_deep_and_not_in_hidden_ones(tmp_path: Path) -> None:
    for place in ("a/b/c/d", "1/2/3/4/5", ".hidden/e"):
        make_sweep(tmp_path / place, {"STS": [0.2, 0.6]}, model=place)
    assert [run.name for run in board(tmp_path).runs] == ["a/b/c/d"]


def test_summary_has_the_interval_of_the_gain_and_the_costs(tmp_path: Path) -> None:
    for name, scores in {"m1": [0.2, 0.6, 0.5], "m2": [0.1, 0.59, 0.2]}.items():
        result = make_sweep(tmp_path / name, {"STS": scores}, model=name)
        rows = [("STS", layer, [value - 0.02 * layer, value + 0.02 * layer]) for layer, value in enumerate(scores)]
        replace(result, resamples=pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row")).save()
    actual = board(tmp_path)
    assert actual.summary() == (
        "m1 at layer 1 scores 60.0 on STS, the highest of 2 runs. It has +10.0 points over its last layer (95 % "
        f"interval +8.1 to +11.9). Its costs: {cost_text(actual.chosen().costs)}."
    )
    assert actual.summary() in actual.html().replace("\N{NO-BREAK SPACE}", " ")
    assert "the highest within 1000 parameters" in board(tmp_path, max_parameters=1000).summary()


def test_front_has_no_dominated_point() -> None:
    """A point is on the front unless another costs no more and scores no less."""
    rng = random.Random(0)
    for _ in range(50):
        frame = point_rows(*(("r", k, float(rng.randint(0, 9)), {"bytes": rng.randint(1, 9)}) for k in range(12)))
        beaten = {
            point["layer"]
            for point, rival in itertools.permutations(frame.to_dicts(), 2)
            if rival["bytes"] <= point["bytes"]
            and rival["score"] >= point["score"]
            and (rival["bytes"], rival["score"]) != (point["bytes"], point["score"])
        }
        expected = frame.filter(~pl.col("layer").is_in(beaten)).select("bytes", "score").unique()
        assert pareto_front(frame, "bytes").select("bytes", "score").rows() == sorted(expected.rows())
    assert pareto_front(point_rows(("r", 0, 1.0, {})), "bytes").is_empty()


def test_chosen_layer_is_the_best_of_any_run_within_the_budget(two_runs: Path) -> None:
    frame = board(two_runs).to_frame()
    chosen = [best_within(frame, budget) for budget in ({}, {"parameters": 59}, {"parameters": 10})]
    assert [(point.run, point.layer) for point in chosen] == [("b", 2), ("a", 1), ("a", 0)]
    best = best_within(frame, {"parameters": 59, "milliseconds": 0.6})  # neither run's best layer
    assert (best.run, best.layer, best.score) == ("b", 1, pytest.approx(30))
    with pytest.raises(
        OptionError, match=r"none is within 5 parameters: the nearest is a at layer 0, 20\.0 points, 10 para"
    ):
        best_within(frame, {"parameters": 5})
    without_costs = point_rows(("c", 0, 90.0, {}))
    with pytest.raises(OptionError, match="no run recorded ms per text: run the sweeps again"):
        best_within(without_costs, {"milliseconds": 5})
    both = pl.concat([without_costs, frame.select(without_costs.columns)])
    assert best_within(both, {"bytes": 40}).run == "b", "an unknown cost is not within a budget"


def test_equal_scores_are_resolved_by_fewer_parameters() -> None:
    points = point_rows(("large", 1, 5.0, {"parameters": 9}), ("small", 1, 5.0, {"parameters": 3}))
    assert best_within(points, {}).run == "small"
    equal = point_rows(*(("m", layer, 5.0, {"parameters": 3}) for layer in (2, 1, 3)))
    assert best_within(equal, {}).layer == 1, "the lowest layer"


def test_nearest_layer_exceeds_its_worst_limit_the_least() -> None:
    points = point_rows(
        ("far", 0, 9.0, {"parameters": 10, "bytes": 400}),
        ("near", 1, 5.0, {"parameters": 20, "bytes": 300}),
        ("near", 2, 6.0, {"parameters": 30, "bytes": 200}),  # 3 times the limit as well, and a higher score
    )
    message = "none is within 10 parameters, 100 bytes per vector: the nearest is near at layer 2, 6.0 points, 30 param"
    with pytest.raises(OptionError, match=message):
        best_within(points, {"parameters": 10, "bytes": 100})


def test_chart_has_a_curve_a_disc_and_a_front_for_each_cost(two_runs: Path) -> None:
    figure = board(two_runs).plot()
    assert titles(figure) == ["Score by parameters", "Score by ms per text", "Score by bytes per vector"]
    for axes, curves in zip(figure.axes, (2, 2, 0), strict=True):  # all layers of a run have the same number of bytes
        assert len(artists(axes, "line")) == curves
        assert len(artists(axes, "dots")) == 2
    first = figure.axes[0]
    (front,) = artists(first, "front")
    assert front.get_drawstyle() == "steps-post"
    assert list(front.get_xdata()) == [10, 20, 60, first.get_xlim()[1]]
    assert list(front.get_ydata()) == pytest.approx([20, 60, 70, 70])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Pareto front", "b", "a"]
    assert points(artists(first, "dots")[0]) == [(60, pytest.approx(70))]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
