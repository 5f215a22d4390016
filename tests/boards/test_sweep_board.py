"""Boards from folders of sweeps: what is compared, what is left out, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder, board
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.boards.sweep_board import cost_text
from midlayer_encoders.files import sealed
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.sweeping import SweepResult
from tests.report.drawn_artists import artists
from tests.report.made_runs import make_sweep

ONE = {"STS": [0.2, 0.6, 0.5], "Own-0a1b2c3d": [0.4, 0.2, 0.3]}
OTHER = {"STS": [0.1, 0.3, 0.7], "Else": [0.9, 0.9, 0.9]}


def test_only_tasks_that_all_runs_share_are_compared(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", ONE, model="m1")
    make_sweep(tmp_path / "other", OTHER, model="m2")
    actual = board([tmp_path / "one", tmp_path / "other"])
    assert actual.tasks == ("STS",)
    assert repr(actual) == "<Board: ['m2', 'm1'], tasks=['STS']>"
    assert [(run.name, run.best.layer, run.best.score) for run in actual.runs] == [
        ("m2", 2, pytest.approx(70)),
        ("m1", 1, pytest.approx(60)),
    ]
    assert actual.left_out == {"Else": ("m1",), "Own": ("m2",)}
    assert set(actual.remarks) == {"Left out: Else, not in m1.", "Left out: Own, not in m2."}
    assert actual.runs[0].best.costs == {
        "parameters": 120,
        "milliseconds": pytest.approx(3.0),
        "tokens": 9.5,
        "bytes": 32,
    }


def test_runs_are_ranked_by_their_best_layer_not_their_last(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", {"STS": [0.2, 0.9, 0.1]}, model="m1")
    make_sweep(tmp_path / "other", {"STS": [0.1, 0.3, 0.7]}, model="m2")
    assert [run.name for run in board([tmp_path / "other", tmp_path / "one"]).runs] == ["m1", "m2"]


def test_a_folder_that_holds_several_is_searched_and_says_what_it_left_out(tmp_path: Path) -> None:
    make_sweep(tmp_path / "a" / "deep", ONE, model="m1")
    make_sweep(tmp_path / "b", ONE, model="m2")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "midlayer.lock").touch()
    (tmp_path / "notes").mkdir()
    actual = board(tmp_path)
    assert [run.name for run in actual.runs] == ["m1", "m2"]
    assert f"Left out: `runs` must be finished, but the sweep in {tmp_path / 'half'} is not: " in actual.remarks[0]
    repeated = board([tmp_path, tmp_path / "b", tmp_path / "a" / ".." / "b"])  # the same folder by another name
    assert [run.name for run in repeated.runs] == ["m1", "m2"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nothing", "`runs` must be folders of sweeps, but .*nothing does not exist: pass the --out"),
        ("empty", "but .*empty does not: pass the --out of a sweep"),
        ("half", "must be finished, but the sweep in .*half is not: run the same command again"),
        ("unscored", "must have scores, but .*unscored has none"),
        ("broken", "but .*broken has no readable frame.parquet and sweep.json. Run the sweep again"),
    ],
)
def test_what_is_no_finished_sweep_of_scores_is_refused(case: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
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
    for name in ("x/last", "y/last", "mean"):
        make_sweep(tmp_path / name, ONE, how={"weights": name, "dtype": "float32"})
    make_sweep(tmp_path / "step", ONE, revision="step8")
    names = {run.name for run in board(tmp_path).runs}
    assert names == {"m (mean)", f"m ({tmp_path / 'x/last'})", f"m ({tmp_path / 'y/last'})", "m@step8"}


def test_each_recipe_of_a_sweep_is_a_run_with_lines_of_its_own(tmp_path: Path) -> None:
    scores = {"plain": {"STS": [0.2, 0.6, 0.5]}, "one-word": {"STS": [0.1, 0.3, 0.7]}}
    parts = {
        name: make_sweep(tmp_path / "both/recipes" / name, values, options={"recipe": name})
        for name, values in scores.items()
    }
    SweepResult.of(parts, tmp_path / "both").save()
    actual = board(tmp_path, max_parameters=115)
    assert [run.name for run in actual.runs] == ["m with one-word", "m"]
    assert actual.lines(actual.runs[0].best)["shell"] == "midlayer export m --layer 2 --recipe one-word --out layer-2"
    assert (actual.chosen().run, actual.chosen().layer) == ("m", 1)
    make_sweep(tmp_path / "plain again", scores["plain"])
    names = [run.name for run in board([tmp_path / "both", tmp_path / "plain again"]).runs]
    assert names == ["m with one-word", "m (both)", "m (plain again)"]


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


def test_older_runs_have_dashes_and_other_devices_a_warning(tmp_path: Path) -> None:
    make_sweep(tmp_path / "new", ONE, model="m1")
    old = make_sweep(
        tmp_path / "old",
        ONE,
        model="m2",
        timing={},
        dimensions=0,
        tokens={},
        seconds={2: 0.016},
        how={"device": "cuda:0"},
    )
    data = json.loads((tmp_path / "old/sweep.json").read_text())
    left_out = ("timing", "dimensions", "tokens", "checksum")
    (tmp_path / "old/sweep.json").write_bytes(sealed({k: v for k, v in data.items() if k not in left_out}))
    assert SweepResult.load(tmp_path / "old").notes == old.notes
    actual = board(tmp_path)
    assert "Times are from different devices (cpu, 1 thread; cuda:0): compare them within one." in actual.remarks
    assert "No ms per text recorded for m2: repeat the sweep to add them." in actual.remarks
    assert "No tokens per text recorded for m2: repeat the sweep to add them." in actual.remarks
    assert "No bytes per vector recorded for m2: repeat the sweep to add them." in actual.remarks
    assert actual.to_frame().filter(run="m2", layer=2)["milliseconds"].item() == pytest.approx(1.0)  # of 16 texts
    assert actual.to_frame()["bytes"].to_list() == [32.0] * 3 + [None] * 3
    page = board(tmp_path, max_bytes=1).html()
    assert "none is within 1 bytes per vector: the nearest is m1 at layer 1" in page
    assert "the highest of 2 runs" in page


def test_baselines_of_any_run_stand_below_the_table(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", ONE, model="m1", baselines={"TF-IDF": {"STS": 0.55, "Own-0a1b2c3d": 0.1}})
    make_sweep(tmp_path / "two", OTHER, model="m2", baselines={"Other": {"Else": 0.5}})
    page = board(tmp_path).html()
    assert '<th scope="row">TF-IDF</th><td></td><td></td><td>55.0</td>' in page
    assert "Other" not in page
    assert board(tmp_path).plot().axes


def test_frame_and_dictionary_hold_every_layer_and_the_best_one(tmp_path: Path) -> None:
    make_sweep(tmp_path / "one", {"STS": [0.2, 0.6, 0.5]}, model="m1", baselines={"TF-IDF": {"STS": 0.4}})
    make_sweep(tmp_path / "two", {"STS": [0.125, 0.25]}, model="m2", baselines={"TF-IDF": {"STS": 0.1}})
    actual = board(tmp_path, max_parameters=105)
    assert actual.to_frame().rows() == [
        ("m1", "one", 0, 20.0, False, 100.0, 1.0, 9.5, 32.0),
        ("m1", "one", 1, 60.0, True, 110.0, 2.0, 9.5, 32.0),
        ("m1", "one", 2, 50.0, False, 120.0, 3.0, 9.5, 32.0),
        ("m2", "two", 0, 12.5, False, 100.0, 1.0, 9.5, 32.0),
        ("m2", "two", 1, 25.0, True, 110.0, 2.0, 9.5, 32.0),
    ]
    assert actual.to_frame().columns == [
        "run",
        "folder",
        "layer",
        "score",
        "best",
        "parameters",
        "milliseconds",
        "tokens",
        "bytes",
    ]
    values = actual.to_dict()
    assert {name: values[name] for name in ("tasks", "left_out", "remarks", "budget")} == {
        "tasks": ("STS",), "left_out": {}, "remarks": (), "budget": {"parameters": 105},
    }  # fmt: skip
    assert [(run["folder"], run["run"], run["layer"], run["gain"]) for run in values["runs"]] == [
        ("one", "m1", 1, pytest.approx(10)),
        ("two", "m2", 1, 0.0),
    ]
    figure = actual.plot()
    assert [level.get_label() for level in artists(figure.axes[0], "level")] == ["TF-IDF 40.0"], "of the first run"


def test_tokens_are_those_of_the_shared_tasks_and_on_the_page(tmp_path: Path) -> None:
    scores = {"STS": [0.2, 0.6], "Own": [0.2, 0.6], "Else": [0.2, 0.6]}
    tokens = {"STS": 10.0, "Own": 25.0, "Else": 400.0}
    make_sweep(tmp_path / "one", scores, model="m1", tokens=tokens)
    make_sweep(tmp_path / "two", {"STS": [0.2, 0.5], "Own": [0.2, 0.5]}, model="m2", tokens={"STS": 30.0})
    actual = board(tmp_path)
    assert actual.to_frame().filter(layer=1)["tokens"].to_list() == [17.5, 30.0]
    assert [run["costs"]["tokens"] for run in actual.to_dict()["runs"]] == [17.5, 30.0]
    page = actual.html()
    assert all(f"<td>{value}</td>" in page for value in ("17.5", "30"))
    assert "17.5 tokens per text" in page


def test_sweeps_are_found_four_folders_deep_and_not_in_hidden_ones(tmp_path: Path) -> None:
    for place in ("a/b/c/d", "1/2/3/4/5", ".hidden/e"):
        make_sweep(tmp_path / place, {"STS": [0.2, 0.6]}, model=place)
    assert [run.name for run in board(tmp_path).runs] == ["a/b/c/d"]


def test_device_of_a_run_without_times_is_not_compared(tmp_path: Path) -> None:
    make_sweep(tmp_path / "timed", {"STS": [0.2, 0.6]}, model="m1")
    make_sweep(tmp_path / "untimed", {"STS": [0.2, 0.6]}, model="m2", seconds={}, timing={}, how={"device": "cuda:0"})
    assert board(tmp_path).remarks == ("No ms per text recorded for m2: repeat the sweep to add them.",)


def test_summary_of_a_board_has_intervals_and_a_baseline_that_is_ahead(tmp_path: Path) -> None:
    for name, scores in {"m1": [0.2, 0.6, 0.5], "m2": [0.1, 0.59, 0.2]}.items():
        result = make_sweep(tmp_path / name, {"STS": scores}, model=name, baselines={"MiniLM": {"STS": 0.65}})
        rows = [("STS", layer, [value - 0.02 * layer, value + 0.02 * layer]) for layer, value in enumerate(scores)]
        replace(result, resamples=pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row")).save()
    sentences = [
        "MiniLM scores 65.0 on STS, 5.0 points more than the best encoder.",
        "m1 at layer 1 scores 60.0 on STS, the highest of 2 runs.",
        "It has +10.0 points over its last layer (95 % interval +8.1 to +11.9).",
        "It has +1.0 points over m2 at layer 1 (95 % interval +1.0 to +1.0).",
    ]
    actual = board(tmp_path)
    assert actual.summary() == f"{' '.join(sentences)} Its costs: {cost_text(actual.chosen().costs)}."
    assert " ".join(sentences) in actual.html().replace("\N{NO-BREAK SPACE}", " ")
    within = board(tmp_path, max_parameters=1000).summary()
    assert "the highest within 1000 parameters" in within
    assert "over m2" not in within
