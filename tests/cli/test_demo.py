"""``midlayer demo``: what it prints is what the sweep and the encoders give, on one screen."""

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.cli import app
from midlayer_encoders.cli._demo_story import Ranked, rank_descriptions, story_lines
from midlayer_encoders.files import shell_path
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.models import hub
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.sweep_result import Notes
from midlayer_encoders.tasks import resolve_tasks, task_label
from midlayer_encoders.tasks.docstrings import BUILTIN_TASKS, builtin_data
from midlayer_encoders.tasks.task_data import TaskData, as_columns
from tests.recipes.test_word_echo import save_causal
from tests.report.made_frames import rows_frame

ROWS = [
    ("the cat", ["a cat sat on the mat"], ["this sentence means one word", "the mat"]),
    ("one word", ["this sentence means one word"], ["a cat sat on the mat", "the mat sat on a"]),
]


def made_result(folder: Path, scores: dict[str, list[float]], spread: float) -> SweepResult:
    """Return a result of two recipes on one task; resampled scores are shifted by the spread both ways."""
    parts = {}
    for recipe, points in scores.items():
        rows = [
            ("m", "main", layer, layer / 3, "score", "STS", "spearman", value / 100)
            for layer, value in enumerate(points)
        ]
        samples = [
            ("STS", layer, [(value + side * spread * layer) / 100 for side in (-1, 0, 1)])
            for layer, value in enumerate(points)
        ]
        resamples = pl.DataFrame(samples, schema=RESAMPLES_SCHEMA, orient="row")
        notes = Notes("m", "m", {}, baselines={"TF-IDF": {"STS": 0.44}})
        parts[recipe] = SweepResult(rows_frame(rows), folder, notes, resamples=resamples)
    return SweepResult.of(parts, folder)


def made_ranking() -> Ranked:
    before = [np.array([0.1, 0.5, 0.2]), np.array([0.3, 0.2, 0.9]), np.array([0.9, 0.1, 0.2])]
    after = [np.array([0.6, 0.5, 0.2]), np.array([0.9, 0.2, 0.1]), np.array([0.9, 0.1, 0.2])]
    texts = [[f"right {n}", f"wrong {n}", f"other {n} " + "x" * 90] for n in range(3)]
    return Ranked(["query 0", "query 1", "query 2"], texts, before, after)


def test_story_states_the_gains_and_examples(tmp_path: Path) -> None:
    result = made_result(tmp_path, {"plain": [30, 50, 46, 40], "word-echo": [20, 30, 60, 57]}, spread=0.1)
    text = "\n".join(lines := story_lines(result, "word-echo", 2, made_ranking()))
    assert lines[0] == "SmolLM2-135M scores 60.0 with word-echo at layer 2, and 40.0 as it comes."
    assert "Together they gain +20.0 (+19.9 to +20.1)." in " ".join(text.split())
    bars = [line.split("░")[0].split("█")[0].strip() for line in lines[2:6]]
    assert bars == ["as it comes, last layer", "best plain layer, 1 of 3", "word-echo at layer 2", "TF-IDF"]
    assert "40.0\n" in text
    assert "50.0  [+10.0 (+9.8 to +10.2)]" in text
    assert "60.0  [+10.0 (+9.9 to +10.1)]" in text
    assert "44.0\n" in text
    assert [line.count("█") for line in lines[2:6]] == [13, 17, 20, 15], "20 for the highest score"
    assert "right for 1 of 3 as it comes, for 3 with word-echo" in " ".join(text.split())
    assert text.index("“query 1”") < text.index("“query 0”"), "the larger lead first"
    assert "“query 2”" not in text, "it was right before"
    assert "before  other 1 " in text
    assert "after   right 1" in text
    assert max(map(len, lines)) <= 79
    assert len(lines) + 3 <= 24, "with the lines of the encoder and the report"


def test_story_says_that_a_layer_gains_nothing(tmp_path: Path) -> None:
    unsure = made_result(tmp_path, {"plain": [30, 41, 40], "word-echo": [20, 30, 60]}, spread=3)
    assert "not separable from zero" in " ".join(story_lines(unsure, "word-echo", 2, made_ranking()))
    last = made_result(tmp_path, {"plain": [30, 31, 40], "word-echo": [20, 30, 60]}, spread=0.1)
    assert "No layer beats the last one here." in " ".join(story_lines(last, "word-echo", 2, made_ranking()))


@pytest.mark.long
def test_ranking_is_that_of_the_encoders(tmp_path: Path) -> None:
    folder = save_causal("byte level", tmp_path / "model")
    path = tmp_path / "near.jsonl"
    path.write_text(
        "".join(json.dumps(dict(zip(("query", "positive", "negative"), row, strict=True))) + "\n" for row in ROWS)
    )
    data = TaskData(
        label="near", type="Reranking", origin="here", description="",
        splits={"test": as_columns(("query", "positive", "negative"), ROWS)},
    )  # fmt: skip
    encoder = LayerEncoder(folder, -1, device="cpu")
    sweep(encoder, str(path), recipes=["plain", "word-echo"], baselines=False, out=tmp_path / "out")
    ranked = rank_descriptions(encoder, data, tmp_path / "out", [("plain", 5), ("word-echo", 4)])
    readers = (LayerEncoder(folder, -1, device="cpu"), LayerEncoder(folder, 4, recipe="word-echo", device="cpu"))
    for reader, found in zip(readers, (ranked.before, ranked.after), strict=True):
        for (query, positive, negative), near in zip(ROWS, found, strict=True):
            vectors = reader.encode([query, *positive, *negative], normalize_embeddings=True)
            np.testing.assert_allclose(near, vectors[1:] @ vectors[0], atol=1e-5)


def test_small_tasks_have_four_objects_of_each_subject() -> None:
    small = {task_label(task.metadata.name): task.metadata.name for task in resolve_tasks("builtin-small")}
    assert small.keys() == BUILTIN_TASKS.keys()
    assert not {task.metadata.name for task in resolve_tasks("builtin")} & set(small.values())
    for label in ("DocstringDescriptionReranking", "DocstringSubjectClustering"):
        few, all_rows = (builtin_data(label, name).splits["test"] for name in ("builtin-small", "builtin"))
        column = "query" if "query" in few else "sentences"
        assert len(few[column]) == 24 * 4
        assert set(few[column]) < set(all_rows[column])


@pytest.mark.docs
def test_demo_prints_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model stands for the built-in one, whose demo takes minutes."""
    folder = save_causal("byte level", tmp_path / "model")
    monkeypatch.setattr(hub, "built_in_model", lambda _: (str(folder), None))
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo")], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"SmolLM2-135M scores [\d.]+ with word-echo at layer 5, and [\d.]+ as it comes.", lines[0])
    assert len(lines) <= 24
    assert max(map(len, lines[:-1])) <= 79
    assert lines[-1] == f"The report: {shell_path(tmp_path / 'demo' / 'report.html')}"
    code = "\n".join(lines[lines.index("In Python:") + 1 : -1])
    assert code.endswith("\nLayerEncoder('built-in', layer=5, recipe='word-echo')")
    exec(code, {})  # as printed
    assert (tmp_path / "demo" / "report.html").is_file()
