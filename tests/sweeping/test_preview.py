"""The preview of a sweep reports what the sweep would do, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Stage
from midlayer_encoders.errors import LayerIndexError
from midlayer_encoders.sweeping import SweepSettings, preview
from midlayer_encoders.sweeping.previews import _time_embedding
from tests.families import DEPTH
from tests.others_warnings import MTEB
from tests.store.listing import list_stores
from tests.sweeping.scoring import QUICK, sweep
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tasks.test_beir import write_beir

Folder = Callable[[str], str]
pytestmark = MTEB


@pytest.mark.slow
def test_preview_reports_texts_and_store_size(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks: list[Any] = [
        write_beir(tmp_path / "mine"),
        write(tmp_path / "classes.jsonl", ROWS["Classification"]),
        write(tmp_path / "pairs.jsonl", ROWS["BitextMining"]),
        write(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES]),
    ]
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", prompts={"query": "find: ", "document": ""})
    before = sorted(path for path in tmp_path.rglob("*"))
    reports: dict[str, tuple[int, int]] = {}
    settings: dict[str, Any] = {"layers": [0, 2, 4], "store_dtype": "float16"}
    halved = SweepSettings(store_dtype="float16")
    report = lambda stage, *counts: reports.update({stage: counts})  # noqa: E731
    plan = preview(encoder, tasks, layers=[0, 2, 4], settings=halved, progress=report)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert plan.error is None
    sweep(encoder, tasks[:3], out=tmp_path / "out", **settings, **{**QUICK, "device": "cpu"})
    (store,) = list_stores(tmp_path / "out/embeddings")
    assert plan.texts == store.texts
    assert plan.store_bytes == store.texts * 3 * store.dim * 2
    assert (plan.layers, plan.dim, plan.device) == (3, store.dim, "cpu")
    mine, classes, pairs, texts = plan.tasks
    assert mine.scoring == classes.scoring == "all layers together"
    assert pairs.scoring.startswith("by mteb, because")
    assert (texts.scoring, texts.texts) == ("none: it has no labels", 0)
    assert plan.seconds > 0
    assert reports["looking"] == (4, 4)
    assert reports["timing"][0] == reports["timing"][1]
    assert json.loads(json.dumps(asdict(plan)))["tasks"][0]["why"] == "corpus, queries and qrels"


def test_recipes_with_other_vectors_need_more_storage(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    single = preview(tiny_folder("Llama"), path, device="cpu")
    several = preview(tiny_folder("Llama"), path, device="cpu", recipes=["plain", "plain+center", "one-word"])
    assert single.layers == DEPTH + 1
    assert several.store_bytes == 2 * single.store_bytes  # centering reuses the plain vectors


def test_preview_reports_errors_and_checks_the_rest(tiny_folder: Folder, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [{"sentence1": "a", "sentence2": "", "score": 1}])
    good = write(tmp_path / "good.jsonl", ROWS["STS"])
    plan = preview(str(tmp_path / "no model"), [bad, good, "./gone.csv"])
    assert plan.error is not None
    assert "no model" in plan.error
    first, second, third = plan.tasks
    assert first.error is not None
    assert "bad.jsonl, line 1: `sentence2` must be a string that is not empty" in first.error
    assert (second.error, second.type, second.why) == (None, "STS", "columns sentence1, sentence2, score")
    assert third.error is not None
    assert "there is no" in third.error
    assert not plan.seconds
    with pytest.raises(LayerIndexError):
        preview(tiny_folder("Llama"), bad, layers=[99], device="cpu")
    images = preview(tiny_folder("ViT"), good, device="cpu")
    assert images.error is not None
    assert "takes image: a preview needs a text model" in images.error


def test_time_is_that_of_all_batches(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    clock = iter(range(1000))
    monkeypatch.setattr("midlayer_encoders.sweeping.previews.time.perf_counter", lambda: float(next(clock)))
    texts = [f"text {number}" for number in range(8)]
    monkeypatch.setattr("midlayer_encoders.sweeping.previews.batches_of", lambda *_, **__: [[n] for n in range(8)])
    stage = Stage(None, "timing", 5)
    assert _time_embedding(encoder, [0, 1], 64, texts, stage) == 8.0, "a second for each of eight batches"
    assert stage.done == 5
