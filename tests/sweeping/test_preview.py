"""A sweep looked at before it is run: it says what the sweep then does, and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError
from midlayer_encoders.store import list_stores
from midlayer_encoders.sweeping import preview
from tests.families import DEPTH
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, sweep
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tasks.test_beir import beir

Folder = Callable[[str], str]
pytestmark = MTEB


@pytest.mark.slow
def test_it_says_how_many_texts_a_sweep_embeds_and_what_the_store_takes(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks: list[Any] = [
        beir(tmp_path / "mine"),
        write(tmp_path / "classes.jsonl", ROWS["Classification"]),
        write(tmp_path / "pairs.jsonl", ROWS["BitextMining"]),
        write(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES]),
    ]
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", prompts={"query": "find: ", "document": ""})
    before = sorted(path for path in tmp_path.rglob("*"))
    reports: dict[str, tuple[int, int]] = {}
    how: dict[str, Any] = {"layers": [0, 2, 4], "store_dtype": "float16"}
    found = preview(encoder, tasks, progress=lambda stage, *of: reports.update({stage: of}), **how)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert found.error is None
    sweep(encoder, tasks[:3], out=tmp_path / "out", **how, **{**QUICK, "device": "cpu"})
    (kept,) = list_stores(tmp_path / "out/embeddings")
    assert found.texts == kept.texts
    assert found.store_bytes == kept.texts * 3 * kept.dim * 2
    assert (found.layers, found.dim, found.device) == (3, kept.dim, "cpu")
    mine, classes, pairs, texts = found.tasks
    assert mine.scoring == classes.scoring == "all layers together"
    assert pairs.scoring.startswith("by mteb, because")
    assert (texts.scoring, texts.texts) == ("none: it has no labels", 0)
    assert found.not_timed == ["pairs"]
    assert found.seconds["whole"] == pytest.approx(
        sum(found.seconds[name] for name in ("embedding", "scoring", "other"))
    )
    assert all(value > 0 for name, value in found.seconds.items() if name != "other")
    assert found.timed >= 1
    assert reports["looking"] == (4, 4)
    assert reports["timing"][0] == reports["timing"][1]
    assert json.loads(json.dumps(asdict(found)))["tasks"][0]["data"]["rows"]["documents"] == 48


def test_lengths_are_counted_before_texts_are_truncated(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=12)
    path = write(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES])
    found = preview(encoder, path)
    assert (found.layers, found.max_tokens, found.seconds) == (DEPTH + 1, 12, {})  # nothing is embedded to be scored
    (task,) = found.tasks
    counts = sorted(len(encoder.tokenizer(text)["input_ids"]) for text in SENTENCES)
    assert task.tokens == {"median": counts[24], "95 %": counts[45], "longest": counts[-1]}
    assert counts[-1] > 12
    assert task.truncated == sum(count > 12 for count in counts) / 48


def test_more_recipes_take_more_time_and_room_where_their_vectors_differ(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    one = preview(tiny_folder("Llama"), path, device="cpu")
    several = preview(tiny_folder("Llama"), path, device="cpu", recipes=["plain", "plain+center", "one-word"])
    assert one.layers == DEPTH + 1
    assert several.store_bytes == 2 * one.store_bytes  # centered vectors are those of the plain text


def test_what_a_sweep_would_refuse_is_said_and_the_rest_is_looked_at(tiny_folder: Folder, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [{"sentence1": "a", "sentence2": "", "score": 1}])
    good = write(tmp_path / "good.jsonl", ROWS["STS"])
    found = preview(str(tmp_path / "no model"), [bad, good, "./gone.csv"])
    assert found.error is not None
    assert "no model" in found.error
    first, second, third = found.tasks
    assert first.error is not None
    assert "bad.jsonl, line 1: `sentence2` must be a string that is not empty" in first.error
    assert second.data is not None
    assert (second.error, second.data.rows) == (None, {"test": 48})
    assert third.error is not None
    assert "there is no" in third.error
    assert not found.seconds
    with pytest.raises(LayerIndexError):
        preview(tiny_folder("Llama"), bad, layers=[99], device="cpu")
    images = preview(tiny_folder("ViT"), good, device="cpu")
    assert images.error is not None
    assert "takes image: a preview needs a text model" in images.error


def test_tasks_of_one_name_are_timed_each(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "midlayer_encoders.sweeping.previews.layer_scores", lambda _, keys, *__, **___: asked.append(len(keys))
    )
    rows = ROWS["STS"]
    tasks = [write(tmp_path / "one/mine.jsonl", rows[:20]), write(tmp_path / "two/mine.jsonl", rows[20:45])]
    preview(LayerEncoder(tiny_folder("Llama"), -1, device="cpu"), tasks)
    assert len(asked) == 2
