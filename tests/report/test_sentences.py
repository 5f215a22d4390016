"""Sentences state the numbers of their tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from midlayer_encoders import EncoderOptions
from midlayer_encoders.cli import _arguments, find
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import Curve, Summary
from midlayer_encoders.report.layer_charts import recipe_words
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.best_layer import Notes
from tests.report.made_frames import rows_frame


def summary_of(points: dict[int, float]) -> Summary:
    return Summary("m", "main", 8, (Curve("task", "accuracy", points),), Curve("average", "", points), (), ())


def test_sentence_about_recipes_states_layer_score_and_both_gains() -> None:
    plain, prompted = summary_of({2: 41.0, 5: 52.5, 8: 47.25}), summary_of({2: 40.0, 6: 61.75, 8: 60.0})
    assert recipe_words({"plain": plain, "one-word": prompted}) == (
        "one-word at layer 6 of 8 scores 61.8: 9.2 points more than the best layer of the plain text (5, 52.5), 14.5 more "
        "than its last."
    )
    assert recipe_words({"one-word": prompted}) == (
        "one-word at layer 6 of 8 scores 61.8, 1.8 points more than at its last layer."
    )
    assert recipe_words({"plain": prompted, "one-word": plain}) == (
        "plain at layer 6 of 8 scores 61.8: nothing else that was compared is better."
    )


def printed(show: Callable[..., object], *arguments: Any, **keywords: Any) -> list[str]:
    """Return the lines that a function prints on a wide terminal, and that it exits with 1 as its last line if so."""
    application = typer.Typer()
    application.command()(lambda: show(*arguments, **keywords))
    result = CliRunner().invoke(application, [], env={"COLUMNS": "300"}, catch_exceptions=False)
    return [line.rstrip() for line in result.output.splitlines()] + ["exit 1"] * result.exit_code


def test_sweep_without_scores_names_what_to_do(tmp_path: Path) -> None:
    score = ("m", "r", 1, 0.5, "score", "A", "f1", 0.5)
    metric = ("m", "r", 1, 0.5, "metric", "t", "dime", 0.5)
    lines = {}
    for name, rows in (("metrics", [metric]), ("scores", [score])):
        result = SweepResult(rows_frame(rows), tmp_path / name, Notes("Every layer of m", "my model", {}), num_kept=1)
        lines[name] = printed(find.print_sweep, result)
    assert "Nothing was scored. `midlayer select` chooses a layer without labels." in lines["metrics"]
    assert "1 of 1 scores were there from an earlier run." in lines["scores"]
    assert lines["scores"][-3:] == [
        "In Python:",
        "from midlayer_encoders import LayerEncoder",
        "LayerEncoder('my model', layer=1).save_pretrained(\"layer-1\")",
    ]


def test_json_of_a_sweep_is_in_points(tmp_path: Path) -> None:
    rows = [
        ("m", "r", k, k / 2, "score", task, "f1", v + k / 8) for task, v in (("A", 0.5), ("B", 0.25)) for k in (1, 2)
    ]
    notes = Notes("t", "m", {}, baselines={"TF-IDF": {"A": 0.125}})
    result = SweepResult(rows_frame(rows), tmp_path, notes)
    assert find.result_values(result) == {
        "verdict": ["No layer scores more than the last layer: 62.5 on average over 2 tasks."], "baseline_gains": {},
        "model": "m", "revision": "r", "num_layers": 2, "best_layer": 2, "best": 62.5, "last": 62.5,
        "layers": {1: 50.0, 2: 62.5}, "gain": 0.0, "interval": None,
        "tasks": {"A": {"best_layer": 2, "best": 75.0, "last": 75.0, "layers": {1: 62.5, 2: 75.0}},
                  "B": {"best_layer": 2, "best": 50.0, "last": 50.0, "layers": {1: 37.5, 2: 50.0}}},
        "baselines": {"TF-IDF": {"A": 12.5}},
    }  # fmt: skip
    recipes = SweepResult.of({"plain": result}, tmp_path)
    assert find.result_values(recipes)["recipe"] == "plain"
    unscored = SweepResult(rows_frame([]), tmp_path, notes)
    assert find.result_values(unscored) == {"model": "m", "best_layer": None}


def test_recipe_beside_recipes_is_named() -> None:
    with pytest.raises(OptionError, match="`--recipe` cannot be combined with `--recipes`: name it there"):
        _arguments.parse_recipes("plain", EncoderOptions(recipe="one-word"))
