"""Sweeps of your own data: retrieval, the types that are left to mteb, and texts without labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import pytrec_eval

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping import SweepResult
from tests.families import DEPTH
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, near, scores, sweep
from tests.sweeping.test_prompts import PROMPTS, cosine, layer_2
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tasks.test_beir import CORPUS, QRELS, QUERIES, beir

Folder = Callable[[str], str]
pytestmark = MTEB


def test_a_folder_of_beir_s_is_scored_together_with_prompts_of_queries_and_documents(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    task = beir(tmp_path / "mine")
    given: dict[str, Any] = {"prompts": PROMPTS, "default_prompt_name": "plain", **QUICK}
    result = sweep(tiny_folder("Llama"), task, layers=[1, 2], out=tmp_path / "out", **given)
    assert set(result.notes.scoring.values()) == {"all layers together"}
    model = layer_2(tiny_folder, tmp_path / "layer-2")
    documents = [f"{one['title']} {one['text']}".strip() for one in CORPUS]
    found = cosine(
        model.encode_query([one["text"] for one in QUERIES[:12]])[:, None], model.encode_document(documents)[None]
    )
    names = [one["_id"] for one in CORPUS]
    run = {f"q{n}": dict(zip(names, map(float, row), strict=True)) for n, row in enumerate(found)}
    relevant: dict[str, dict[str, int]] = {}
    for query, document, value in QRELS:
        relevant.setdefault(query, {})[document] = value
    each = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10"}).evaluate(run).values()
    expected = np.mean([one["ndcg_cut_10"] for one in each])
    plain = model.encode([*(one["text"] for one in QUERIES[:12]), *documents])
    assert not np.allclose(found, cosine(plain[:12, None], plain[None, 12:]), atol=1e-3)  # the prompts matter
    assert scores(result, task)[2] == pytest.approx(expected, abs=1e-4)
    assert set(result.frame.filter(kind="score")["name"]) == {"ndcg_at_10"}
    checked = result.frame.filter(kind="confirmed", layer=2)["value"].to_list()
    assert checked == [pytest.approx(expected, abs=1e-4)]


def test_mteb_s_own_warnings_stay_out_of_a_sweep_with_baselines(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS["BitextMining"][:6])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        sweep(tiny_folder("Llama"), path, layers=[1], out=tmp_path / "out", workers=1, device="cpu")
    assert [str(one.message) for one in heard if "mteb" in one.filename] == []


@pytest.mark.parametrize("task_type", ["MultilabelClassification", "BitextMining"])
@pytest.mark.slow
def test_what_is_left_to_mteb_is_scored_at_every_layer(task_type: str, tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS[task_type])
    result = sweep(tiny_folder("Llama"), path, layers=[1, 3], out=tmp_path / "out", **QUICK)
    assert not result.failures
    found = scores(result, path)
    assert set(found) == {1, 3}
    assert all(0 < value <= 1 for value in found.values())
    (way,) = result.notes.scoring.values()
    assert way.startswith("by mteb, because it")


def test_texts_without_labels_feed_the_metrics_alone(tiny_folder: Folder, tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES[:20]])
    how: dict[str, Any] = {"metrics": ["curvature"], "metric_texts": 200, **QUICK}
    result = sweep(tiny_folder("Llama"), texts, out=tmp_path / "out", **how)
    assert set(result.frame["kind"]) == {"metric"}
    assert set(result.frame["dataset"]) == {"20 texts of the tasks"}
    assert sorted(result.frame["layer"].unique()) == list(range(DEPTH + 1))
    assert "texts: texts without labels, which are used for metrics" in result.to_html().read_text()
    assert SweepResult.load(tmp_path / "out").notes == result.notes
    task = near(tmp_path)
    both = sweep(tiny_folder("Llama"), [task, texts], out=tmp_path / "both", **how | {"layers": [1]})
    assert len(scores(both, task)) == 1
    every = {row[side] for row in ROWS["STS"] for side in ("sentence1", "sentence2")} | set(SENTENCES[:20])
    assert set(both.frame.filter(pl.col("kind") == "metric")["dataset"]) == {f"{len(every)} texts of the tasks"}
    with pytest.raises(
        OptionError, match=r"`metrics` must name at least one metric for texts-\w+: texts without labels"
    ):
        sweep(tiny_folder("Llama"), texts, out=tmp_path / "none", **QUICK)
    with pytest.raises(OptionError, match="`recipes` must be left out for texts without labels"):
        sweep(tiny_folder("Llama"), texts, out=tmp_path / "none", recipes=["plain"], **how)
    assert not (tmp_path / "none").exists()


def test_a_recipe_that_centers_says_that_tasks_are_read(tiny_folder: Folder, tmp_path: Path) -> None:
    tasks = [near(tmp_path), write(tmp_path / "more.jsonl", [{"text": text} for text in SENTENCES])]
    reports: list[tuple[str, int, int]] = []
    sweep(
        tiny_folder("Llama"), tasks, layers=[1], out=tmp_path / "out", recipes=["plain+center"],
        progress=lambda *report: reports.append(report), **QUICK,
    )  # fmt: skip
    assert reports[:3] == [("reading", 0, 2), ("reading", 1, 2), ("reading", 2, 2)]
    held = (tmp_path / "out/center.txt").read_text().splitlines()
    assert set(held) >= set(SENTENCES)
