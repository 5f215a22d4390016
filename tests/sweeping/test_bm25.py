"""BM25 baseline: mteb's own score on ranking tasks, and a hint where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mteb
import pytest

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.sweeping import SweepResult, baselines
from midlayer_encoders.tasks import resolve_tasks
from midlayer_encoders.tasks.baselines import Bm25Search, has_bm25
from midlayer_encoders.tasks.sources import task_sources
from tests.others_warnings import MTEB
from tests.sweeping.scoring import sweep, write_reranking_task, write_sts_task
from tests.tasks.rows import write
from tests.tasks.test_beir import write_beir

Folder = Callable[[str], str]
installed = pytest.mark.skipif(not has_bm25(), reason="bm25s is not installed: pip install bm25s PyStemmer")
pytestmark = [*MTEB, pytest.mark.filterwarnings("ignore:invalid value encountered in scalar divide")]
OPTIONS: dict[str, Any] = {"layers": [1, 2], "workers": 1, "device": "cpu"}


def mteb_score_of_model(model: Any, path: Path) -> float:
    with isolated_random():
        result = mteb.evaluate(model, resolve_tasks(path)[0], cache=None, show_progress_bar=False)
    return float(result[0].get_score())


@installed
def test_bm25_matches_mteb_and_is_saved(tiny_folder: Folder, tmp_path: Path) -> None:
    tasks = [write_beir(tmp_path / "mine"), write_reranking_task(tmp_path), write_sts_task(tmp_path)]
    names = [task_sources(task)[0].name for task in tasks]
    expected = {name: mteb_score_of_model(mteb.get_model("mteb/baseline-bm25s"), task) for name, task in zip(names, tasks[:2], strict=False)}  # fmt: skip
    assert all(0.2 < value < 1 for value in expected.values())
    result = sweep(tiny_folder("Llama"), tasks, out=tmp_path / "out", **OPTIONS)
    assert result.notes.baselines["BM25"] == pytest.approx(
        expected, abs=1e-4
    )  # not on the STS task, which has no ranking
    assert result.notes.missing == []
    saved_texts = [path.read_text() for path in (tmp_path / "out/together").glob("*.json")]
    assert sum("bm25 " in text for text in saved_texts) == 2
    page = result.to_html().read_text()
    assert f"BM25 {100 * expected[names[0]]:.1f}" in page
    assert SweepResult.load(tmp_path / "out").notes == result.notes


@installed
@pytest.mark.slow
def test_every_candidate_is_ranked_in_a_large_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"query": "granite", "positive": [f"a stone {n}"], "negative": [f"granite lies here {n}", f"no word {n}"]}
        for n in range(600)
    ]
    task = resolve_tasks(write(tmp_path / "many.jsonl", rows))[0]
    rankings: dict[str, dict[str, float]] = {}
    search = Bm25Search.search
    monkeypatch.setattr(Bm25Search, "search", lambda *a, **k: rankings.update(search(*a, **k)) or rankings)
    mteb.evaluate(Bm25Search(), task, cache=None, show_progress_bar=False)
    assert {len(candidates) for candidates in rankings.values()} == {
        3
    }  # most of the 1800 documents share no word with the query


@installed
@pytest.mark.slow
def test_bm25_is_left_out_if_documents_have_no_words(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"query": "?", "positive": ["!"]}, {"query": "??", "positive": ["!!"]}]
    result = sweep(tiny_folder("Llama"), write(tmp_path / "signs.jsonl", rows), out=tmp_path / "out", **OPTIONS)
    assert "BM25" not in result.notes.baselines
    assert not result.failures


def test_page_tells_how_to_install_bm25(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "has_bm25", lambda: False)
    result = sweep(tiny_folder("Llama"), write_reranking_task(tmp_path), out=tmp_path / "out", **OPTIONS)
    assert list(result.notes.baselines) == ["TF-IDF"]
    assert "BM25 is not a baseline because it is not installed: pip install bm25s PyStemmer" in result.html()
    assert baselines.missing_baselines(resolve_tasks(write_sts_task(tmp_path))) == []  # has no ranking
