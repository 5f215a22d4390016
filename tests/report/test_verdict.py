"""The verdict of a sweep: what scores most, the gain of the best layer, the baselines, and what to try next."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders.cli.find import print_sweep, result_values
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA, Curve, Gain, Summary
from midlayer_encoders.models.hub import shown_name
from midlayer_encoders.report.sweep_page import verdict
from midlayer_encoders.sweeping import SweepResult
from tests.report.made_runs import make_sweep
from tests.report.test_sentences import printed

SPREADS = (-0.02, 0.0, 0.01)
LEAD = "3.6 points more than the best layer (95 % interval +1.7 to +4.6)"


def make_result(folder: Path, baseline: float, **notes: Any) -> SweepResult:
    """Return a sweep with a baseline that varies more than the layers when the test items are resampled."""
    scores = {"tickets-0a1b2c3d": [0.703, 0.807, 0.75]}
    resamples = {"MiniLM": {task: [baseline + spread for spread in SPREADS] for task in scores}}
    baselines = {"TF-IDF": dict.fromkeys(scores, 0.5), "MiniLM": dict.fromkeys(scores, baseline)}
    result = make_sweep(folder, scores, baselines=baselines, resamples=resamples, **notes)
    rows = [(task, layer, [value] * len(SPREADS)) for task, by_layer in scores.items() for layer, value in enumerate(by_layer)]  # fmt: skip
    return replace(result, resamples=pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row"))


def test_verdict_of_baseline_ahead_is_the_same_everywhere_and_first(tmp_path: Path) -> None:
    result = make_result(tmp_path, 0.843, hint="Try --recipes plain,word-echo.")
    first, layer, tfidf, hint = result.verdict()
    assert first == f"MiniLM scores 84.3 on tickets, {LEAD}."
    assert layer.startswith("Layer 1 of 2 scores 80.7 on tickets, 5.7 points more than the last layer (75.0), 95 % ")
    assert (
        tfidf
        == "TF-IDF scores 50.0 on tickets, 30.7 points less than the best layer (no interval: tickets was not resampled)."
    )
    sentences = " ".join([first, layer, tfidf, hint])
    lines = printed(print_sweep, result)
    assert sentences in " ".join(lines)
    assert any(line.startswith("Export layer 1: midlayer export m --layer 1 ") for line in lines)
    assert sentences in result.html().replace("\N{NO-BREAK SPACE}", " ")
    assert result_values(result)["verdict"] == [first, layer, tfidf, hint]
    assert str(result) == result.summary() == "\n".join(["Every layer of m", first, layer, tfidf, hint])
    assert f"{first} {layer}" in repr(result)


def test_verdict_of_baseline_behind_begins_with_the_layer(tmp_path: Path) -> None:
    layer, minilm, _ = make_result(tmp_path, 0.8).verdict()
    assert layer.startswith("Layer 1 of 2 scores 80.7 on tickets, ")
    assert minilm == (
        "MiniLM scores 80.0 on tickets, 0.7 points less than the best layer (95 % interval −2.6 to +0.3: the two are not "
        "separable)."
    )


def test_verdict_of_recipes_compares_the_best_with_baselines(tmp_path: Path) -> None:
    plain = make_result(tmp_path / "plain", 0.843)
    echo = make_sweep(tmp_path / "echo", {"tickets-0a1b2c3d": [0.5, 0.6, 0.9]})
    first, *others = SweepResult.of({"plain": plain, "echo": echo}, tmp_path).verdict()
    assert first.startswith("echo at layer 2 of 2 scores 90.0: 9.3 points more")
    assert others[0].startswith("MiniLM scores 84.3 on tickets, 5.7 points less than the best layer (")


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ({0: 50.0, 1: 50.04, 2: 50.0}, "No layer scores more than the last layer: 50.0 on STS."),
        ({0: 50.0, 1: 40.0, 2: 50.0}, "No layer scores more than the last layer: 50.0 on STS."),
    ],
)
def test_verdict_of_equal_layers_names_no_layer(points: dict[int, float], sentence: str) -> None:
    curve = Curve("STS", "spearman", points)
    scores = Summary("m", "main", 2, (curve,), curve, (), ())
    assert verdict(scores, leads={"TF-IDF": Gain(0.01)}) == [
        sentence,
        "TF-IDF scores 50.0 on STS, 0.0 points more than the best layer.",
    ]


def test_json_of_sweep_has_names_without_digests_and_defaults(tmp_path: Path) -> None:
    values = result_values(make_result(tmp_path, 0.843, rows={"tickets-0a1b2c3d": {"test": [10, 20, 1]}}))
    assert list(values["tasks"]) == list(values["baselines"]["MiniLM"]) == list(values["rows"]) == ["tickets"]
    assert (values["model"], values["revision"]) == ("m", None)
    assert values["baseline_gains"]["MiniLM"]["gain"] == pytest.approx(3.6)


def test_page_has_no_default_revision_and_keeps_percents_together(tmp_path: Path) -> None:
    page = make_result(tmp_path, 0.843).html()
    assert "at revision" not in page
    assert "95\N{NO-BREAK SPACE}% interval" in page
    assert "95 % interval" not in page


@pytest.mark.parametrize(
    ("path", "name"),
    [("tiny", "tiny"), ("first run/checkpoint-100", "first run/checkpoint-100"), ("first run/step16", "first run/step16"), ("tuned/model", "tuned/model")],
)  # fmt: skip
def test_shown_name_of_a_folder_has_the_run_of_a_checkpoint(path: str, name: str, tmp_path: Path) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert shown_name(str(tmp_path / path)) == name
    assert shown_name(str(tmp_path / path), "model.Q4_1.gguf") == "model.Q4_1.gguf"
