"""BM25 beside the layers: mteb's own score of it, on tasks that rank texts, and said where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mteb
import pytest

from midlayer_encoders.sweeping import SweepResult, baselines
from midlayer_encoders.tasks import Bm25Search, has_bm25, isolated_random, resolve_tasks, task_sources
from tests.others_warnings import MTEB
from tests.sweeping.scoring import near, ranks, sweep
from tests.tasks.rows import write
from tests.tasks.test_beir import beir

Folder = Callable[[str], str]
installed = pytest.mark.skipif(not has_bm25(), reason="bm25s is not installed: pip install bm25s PyStemmer")
pytestmark = [*MTEB, pytest.mark.filterwarnings("ignore:invalid value encountered in scalar divide")]
HOW: dict[str, Any] = {"layers": [1, 2], "workers": 1, "device": "cpu"}


def by_mteb(model: Any, path: Path) -> float:
    with isolated_random():
        result = mteb.evaluate(model, resolve_tasks(path)[0], cache=None, show_progress_bar=False)
    return float(result[0].get_score())


@installed
def test_bm25_scores_what_mteb_s_own_does_and_is_kept(tiny_folder: Folder, tmp_path: Path) -> None:
    tasks = [beir(tmp_path / "mine"), ranks(tmp_path), near(tmp_path)]
    names = [task_sources(task)[0].name for task in tasks]
    expected = {name: by_mteb(mteb.get_model("mteb/baseline-bm25s"), task) for name, task in zip(names, tasks[:2], strict=False)}  # fmt: skip
    assert all(0.2 < value < 1 for value in expected.values())
    result = sweep(tiny_folder("Llama"), tasks, out=tmp_path / "out", **HOW)
    assert result.notes.baselines["BM25"] == pytest.approx(expected, abs=1e-4)  # not on pairs, which it does not rank
    assert result.notes.missing == []
    kept = [path.read_text() for path in (tmp_path / "out/together").glob("*.json")]
    assert sum("bm25 " in text for text in kept) == 2
    page = result.to_html().read_text()
    assert f"BM25 {100 * expected[names[0]]:.1f}" in page
    assert SweepResult.load(tmp_path / "out").notes == result.notes


@installed
@pytest.mark.slow
def test_every_candidate_is_ranked_however_large_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"query": "granite", "positive": [f"a stone {n}"], "negative": [f"granite lies here {n}", f"no word {n}"]}
        for n in range(600)
    ]
    task = resolve_tasks(write(tmp_path / "many.jsonl", rows))[0]
    found: dict[str, dict[str, float]] = {}
    search = Bm25Search.search
    monkeypatch.setattr(Bm25Search, "search", lambda *a, **k: found.update(search(*a, **k)) or found)
    mteb.evaluate(Bm25Search(), task, cache=None, show_progress_bar=False)
    assert {len(candidates) for candidates in found.values()} == {3}  # of 1800 documents a thousand hold no word of it


@installed
@pytest.mark.slow
def test_documents_without_a_word_leave_it_out(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"query": "?", "positive": ["!"]}, {"query": "??", "positive": ["!!"]}]
    result = sweep(tiny_folder("Llama"), write(tmp_path / "signs.jsonl", rows), out=tmp_path / "out", **HOW)
    assert "BM25" not in result.notes.baselines
    assert not result.failures


def test_where_it_is_not_installed_the_page_says_what_to_install(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "has_bm25", lambda: False)
    result = sweep(tiny_folder("Llama"), ranks(tmp_path), out=tmp_path / "out", **HOW)
    assert list(result.notes.baselines) == ["TF-IDF"]
    assert "BM25 is not a baseline because it is not installed: pip install bm25s PyStemmer" in result.html()
    assert baselines.missing_baselines(resolve_tasks(near(tmp_path))) == []  # which it would not rank
