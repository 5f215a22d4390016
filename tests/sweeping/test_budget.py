"""A sweep with a budget: growing samples, without layers that are clearly worse, within the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.sweeping import SweepResult, halving
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.halving import sweep_within
from tests.cli.calls import run
from tests.others_warnings import MTEB
from tests.sweeping.scoring import sweep
from tests.tasks.rows import SENTENCES, write

Folder = Callable[[str], str]
pytestmark = MTEB


class Rounds:
    """Rounds with given scores by layer, whose intervals shrink with the sample, on a clock of their own."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, scores: Sequence[float], rows: int, seconds: float
    ) -> None:
        self.calls: list[tuple[int | None, list[int]]] = []
        self.folder, self.scores, self.rows, self.seconds = folder, scores, rows, seconds
        self.now = 0.0
        monkeypatch.setattr(halving.time, "monotonic", lambda: self.now)

    def __call__(self, limit: int | None, layers: Any) -> SweepResult:
        layers = list(range(len(self.scores))) if layers == "all" else list(layers)
        self.calls.append((limit, layers))
        count = min(limit or self.rows, self.rows)
        self.now += self.seconds * count
        name = "near" if limit is None else f"near[{limit}]"
        values = {layer: self.scores[layer] for layer in layers}
        rows = tidy_rows(values, NamedSubject("m", None, 4), kind="score", dataset=name, name="spearman")
        noise = np.random.default_rng(0).normal(size=(len(self.scores), 200)) / math.sqrt(count)
        samples = [(name, layer, (value + noise[layer]).tolist()) for layer, value in values.items()]
        resamples = pl.DataFrame(samples, schema=RESAMPLES_SCHEMA, orient="row")
        notes = Notes("m", "m", {}, rows={} if limit is None else {name: {"test": [count, self.rows, 2]}})
        return SweepResult(tidy_frame(rows), self.folder, notes, resamples=resamples)


def test_worse_layers_are_dropped_as_samples_grow_but_never_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = Rounds(monkeypatch, tmp_path, [0.1, 0.6, 0.7, 0.69, 0.05], rows=3000, seconds=0.01)
    result = sweep_within(60, rounds, "all")
    assert rounds.calls == [(64, [0, 1, 2, 3, 4]), (256, [1, 2, 3, 4]), (1024, [1, 2, 3, 4]), (None, [2, 3, 4])]
    assert [[layer[0] for layer in each.get("dropped", [])] for each in result.notes.rounds] == [[0], [], [1], []]
    ((layer, score, low, high),) = result.notes.rounds[0]["dropped"]
    assert (layer, score) == (0, pytest.approx(10.0))
    assert low < -60 < high < 0
    assert set(result.scores["layer"]) == {2, 3, 4}
    words = " ".join(result.sample_words())
    assert "64 rows at 5 layers" in words
    assert "all rows at 3 layers in 0.5 min. It ended there because all rows were scored." in words
    assert "Dropped after 64 rows, with score and 95 % interval against the best layer: 0 (10.0; −" in words
    assert SweepResult.load(tmp_path).sample_words() == result.sample_words()


def test_it_ends_when_one_layer_is_clearly_the_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = Rounds(monkeypatch, tmp_path, [0.1, 0.9, 0.1, 0.1, 0.1], rows=10_000, seconds=0.01)
    result = sweep_within(60, rounds, "all")
    assert rounds.calls == [(64, [0, 1, 2, 3, 4])]
    assert result.notes.rounds[-1]["end"] == "one layer is clearly the best"


@pytest.mark.parametrize(("minutes", "rounds_in_time"), [(0.001, 1), (0.1, 1), (0.8, 2), (1.5, 2), (3, 3), (20, 4)])
def test_a_round_that_would_not_fit_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, minutes: float, rounds_in_time: int
) -> None:
    rounds = Rounds(monkeypatch, tmp_path, [0.69, 0.7, 0.7, 0.7, 0.69], rows=16_000, seconds=0.1)
    result = sweep_within(minutes, rounds, "all")
    assert len(rounds.calls) == rounds_in_time  # of 6.4, 25.6, 102.4 and 409.6 seconds
    assert rounds.now <= max(60 * minutes, 6.4)
    assert "would not fit" in result.notes.rounds[-1]["end"]
    assert result.notes.rounds[-1]["minutes"] == pytest.approx(rounds.now / 60)


def test_a_small_task_is_scored_whole_under_its_own_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rounds = Rounds(monkeypatch, tmp_path, [0.69, 0.7, 0.7], rows=40, seconds=0.01)
    result = sweep_within(60, rounds, "all")
    assert [limit for limit, _ in rounds.calls] == [64, None]
    assert set(result.scores["dataset"]) == {"near"}


@pytest.mark.long
def test_a_sweep_drops_a_planted_layer_without_information(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halving, "FIRST_LIMIT", 60)
    pairs = [
        {
            "sentence1": text,
            "sentence2": " ".join([*text.split()[share:], *other.split()[:share]]),
            "score": 6.0 - share,
        }
        for share in range(5)
        for text, other in zip(SENTENCES, SENTENCES[12:] + SENTENCES[:12], strict=True)
    ]
    path = write(tmp_path / "near.jsonl", pairs)
    encoder = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    blocks = cast(Any, encoder.transformer).encoder.layer
    last = len(blocks)
    with torch.no_grad():  # two dimensions are left after the block before the last
        blocks[-2].output.LayerNorm.weight[2:] = 0
        blocks[-2].output.LayerNorm.bias.zero_()
    arguments: dict[str, Any] = {"store": tmp_path / "store", "workers": 1, "baselines": False}
    result = sweep(encoder, path, budget=60, out=tmp_path / "budget", metrics=["curvature"], **arguments)
    full = sweep(encoder, path, out=tmp_path / "full", **arguments)
    scores, expected = (dict(each.scores.select("layer", "value").iter_rows()) for each in (result, full))
    rounds = result.notes.rounds
    dropped = {layer[0] for each in rounds for layer in each.get("dropped", [])}
    assert rounds[0]["limit"] == 60
    assert last - 1 in dropped
    assert last in scores
    assert dropped | set(scores) == set(expected)
    assert rounds[-1]["limit"] is None
    assert scores == {layer: expected[layer] for layer in scores}
    assert result.best().layer == full.best().layer
    assert result.frame.filter(kind="metric")["layer"].unique().to_list() == sorted(scores)
    assert SweepResult.load(tmp_path / "budget").sample_words() == result.sample_words()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 0}, "`budget` must be above 0 minutes, but got 0"),
        ({"budget": -1}, "`budget` must be"),
        ({"budget": math.nan}, "`budget` must be"),
        ({"budget": 1, "limit": 50}, "`limit` must be left out with `budget`"),
        ({"budget": 1, "recipes": ["plain"]}, "`recipes`, `dims` and `precisions` must be left out"),
        ({"budget": 1, "devices": 2}, "several `devices` must be left out with `budget`"),
    ],
)
def test_wrong_budgets_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": f"text {n}", "label": n % 2} for n in range(40)])
    with pytest.raises(OptionError, match=message):
        sweep("no model", path, out=tmp_path / "out", **arguments)


@pytest.mark.long
def test_the_command_prints_the_rounds(tiny_folder: Folder, tmp_path: Path) -> None:
    pairs = [{"sentence1": text, "sentence2": text[::-1], "score": n % 5} for n, text in enumerate(SENTENCES)]
    path = write(tmp_path / "near.jsonl", pairs)
    flags = ["--tasks", str(path), "--out", str(tmp_path / "out"), "--metrics", "none", "--no-baselines"]
    output = run("sweep", tiny_folder("BERT"), *flags, "--device", "cpu", "--workers", "1", "--budget", "30")
    assert "of 30 minutes: 64 rows at 5 layers" in " ".join(output.split())


@pytest.mark.parametrize("flags", [["--submit", "local"], ["another"]])
def test_the_command_has_a_budget_for_one_model_only(tmp_path: Path, flags: list[str]) -> None:
    with pytest.raises(OptionError, match="`--budget` takes one model, and no `--submit`"):
        run("sweep", "no model", "--tasks", str(tmp_path), "--budget", "1", *flags)


def test_texts_without_labels_have_no_budget(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"text": f"text {n}"} for n in range(40)])
    with pytest.raises(OptionError, match="`budget` must be left out without a task that has labels"):
        sweep("no model", path, out=tmp_path / "out", budget=1, metrics=["curvature"])
