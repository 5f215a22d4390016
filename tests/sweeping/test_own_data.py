"""Sweeps of your own data: retrieval, and texts without labels."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import pytrec_eval

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping import SweepResult
from tests.support.families import DEPTH
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, layer_scores_of, sweep, write_sts_task
from tests.sweeping.test_prompts import PROMPTS, cosine, save_layer_2
from tests.sweeping.test_resume import HEADS, record_texts
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tasks.test_beir import CORPUS, QRELS, QUERIES, write_beir

pytestmark = MTEB


def test_beir_folder_is_scored_with_query_and_document_prompts(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write_beir(tmp_path / "mine")
    options: dict[str, Any] = {"prompts": PROMPTS, "default_prompt_name": "plain", **QUICK}
    result = sweep(tiny_folder("Llama"), task, layers=[1, 2], out=tmp_path / "out", **options)
    assert set(result.notes.scoring.values()) == {"all layers together"}
    model = save_layer_2(tiny_folder, tmp_path / "layer-2")
    documents = [f"{row['title']} {row['text']}".strip() for row in CORPUS]
    similarities = cosine(
        model.encode_query([row["text"] for row in QUERIES[:12]])[:, None], model.encode_document(documents)[None]
    )
    document_ids = [row["_id"] for row in CORPUS]
    run = {f"q{n}": dict(zip(document_ids, map(float, row), strict=True)) for n, row in enumerate(similarities)}
    relevant: dict[str, dict[str, int]] = {}
    for query, document, value in QRELS:
        relevant.setdefault(query, {})[document] = value
    query_scores = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10"}).evaluate(run).values()
    expected = np.mean([score["ndcg_cut_10"] for score in query_scores])
    plain = model.encode([*(row["text"] for row in QUERIES[:12]), *documents])
    assert not np.allclose(similarities, cosine(plain[:12, None], plain[None, 12:]), atol=1e-3)  # the prompts matter
    assert layer_scores_of(result, task)[2] == pytest.approx(expected, abs=1e-4)
    assert set(result.frame.filter(kind="score")["name"]) == {"ndcg_at_10"}
    checked = result.frame.filter(kind="confirmed", layer=2)["value"].to_list()
    assert checked == [pytest.approx(expected, abs=1e-4)]


@pytest.mark.long
def test_data_in_memory_is_scored_like_its_file_and_resumed(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    options: dict[str, Any] = {"layers": [1, 3], "workers": 1, "baselines": False}
    expected = sweep(encoder, write_sts_task(tmp_path), out=tmp_path / "file", **options)
    frame = pd.DataFrame(ROWS["STS"]).rename(columns={"score": "Score"})
    with record_texts(encoder):  # a hook is part of the key
        first = sweep(encoder, {"near": frame}, out=tmp_path / "memory", **options)
    assert first.frame.equals(expected.frame)
    with record_texts(encoder) as read:
        assert sweep(encoder, {"near": frame}, out=tmp_path / "memory", **options).frame.equals(expected.frame)
        assert not read & HEADS
        sweep(encoder, {"near": frame[:40]}, out=tmp_path / "memory", store=tmp_path / "new", **options)
        assert read & HEADS


@pytest.mark.slow
def test_data_in_memory_is_scored_by_worker_processes(tiny_folder: Folder, tmp_path: Path) -> None:
    data = [row["text"] for row in ROWS["Classification"]], [row["label"] for row in ROWS["Classification"]]
    options: dict[str, Any] = {"layers": [1, 2, 3], "scoring": "mteb", "baselines": False, "device": "cpu"}
    frames = [
        sweep(tiny_folder("Llama"), data, out=tmp_path / str(count), workers=count, **options).frame for count in (1, 2)
    ]
    assert len(frames[0]) == 3
    assert frames[0].equals(frames[1])


def test_mteb_warnings_are_suppressed_in_a_sweep_with_baselines(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS["STS"][:6])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sweep(tiny_folder("Llama"), path, layers=[1], out=tmp_path / "out", workers=1, device="cpu")
    assert [str(warning.message) for warning in caught if "mteb" in warning.filename] == []


def test_texts_without_labels_are_used_for_metrics_only(tiny_folder: Folder, tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES[:20]])
    options: dict[str, Any] = {"metrics": ["curvature"], "metric_texts": 200, **QUICK}
    result = sweep(tiny_folder("Llama"), texts, out=tmp_path / "out", **options)
    assert set(result.frame["kind"]) == {"metric"}
    assert set(result.frame["dataset"]) == {"20 texts of the tasks"}
    assert sorted(result.frame["layer"].unique()) == list(range(DEPTH + 1))
    assert "texts: texts without labels, which are used for metrics" in result.to_html().read_text()
    assert SweepResult.load(tmp_path / "out").notes == result.notes
    task = write_sts_task(tmp_path)
    combined = sweep(tiny_folder("Llama"), [task, texts], out=tmp_path / "both", **options | {"layers": [1]})
    assert len(layer_scores_of(combined, task)) == 1
    all_texts = {row[side] for row in ROWS["STS"] for side in ("sentence1", "sentence2")} | set(SENTENCES[:20])
    assert set(combined.frame.filter(pl.col("kind") == "metric")["dataset"]) == {f"{len(all_texts)} texts of the tasks"}
    with pytest.raises(
        OptionError, match=r"one metric for texts without labels, .* `select_layer` \(midlayer select\) chooses"
    ):
        sweep(tiny_folder("Llama"), texts, out=tmp_path / "none", **QUICK)
    with pytest.raises(OptionError, match="do not apply to texts without labels"):
        sweep(tiny_folder("Llama"), texts, out=tmp_path / "none", recipes=["plain"], **options)
    assert not (tmp_path / "none").exists()


def test_centering_recipe_reports_reading_the_tasks(tiny_folder: Folder, tmp_path: Path) -> None:
    tasks = [write_sts_task(tmp_path), write(tmp_path / "more.jsonl", [{"text": text} for text in SENTENCES])]
    reports: list[tuple[str, int, int]] = []
    sweep(
        tiny_folder("Llama"), tasks, layers=[1], out=tmp_path / "out", recipes=["plain+center"],
        progress=lambda *report: reports.append(report), **QUICK,
    )  # fmt: skip
    assert reports[:3] == [("reading", 0, 2), ("reading", 1, 2), ("reading", 2, 2)]
    center_texts = (tmp_path / "out/center.txt").read_text().splitlines()
    assert set(center_texts) >= set(SENTENCES)
