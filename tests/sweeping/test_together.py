"""A sweep that scores all layers together: what mteb confirms, what is kept, and what is left to mteb."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping import SweepResult, mteb_jobs, task_scoring
from midlayer_encoders.tasks import task_sources, tfidf_scores
from tests.families import DEPTH
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, near, ranks, scores, sweep

Folder = Callable[[str], str]
pytestmark = MTEB


def confirmed(result: SweepResult) -> dict[int, float]:
    return dict(result.frame.filter(kind="confirmed").select("layer", "value").iter_rows())


def test_mteb_confirms_the_best_the_second_best_and_the_last_and_writes_files_of_these_alone(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    task = near(tmp_path)
    result = sweep(tiny_folder("Llama"), task, out=tmp_path / "out", **QUICK)
    found, checked = scores(result, task), confirmed(result)
    first, second = sorted(found, key=lambda layer: -found[layer])[:2]
    assert set(checked) == {first, second, DEPTH}
    assert checked == pytest.approx({layer: found[layer] for layer in checked}, abs=1e-4)
    assert len(list((tmp_path / "out/mteb").rglob("near-*.json"))) == len(checked)
    assert result.notes.scoring == {task_sources(task)[0].name: "all layers together"}
    page = result.to_html().read_text()
    assert f"near, confirmed by mteb: layer {min(checked)} {100 * checked[min(checked)]:.1f} (" in page
    assert "the best, the second best and the last confirmed by mteb" in page
    by_mteb = sweep(tiny_folder("Llama"), task, out=tmp_path / "mteb", scoring="mteb", **QUICK)
    assert scores(by_mteb, task) == pytest.approx(found, abs=1e-4)
    assert not confirmed(by_mteb)
    assert "confirmed by mteb" not in by_mteb.html()
    assert by_mteb.notes.how["scoring"] == "near by mteb, because it was requested"


@pytest.mark.slow
def test_what_was_scored_one_way_is_not_taken_for_the_other(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = ranks(tmp_path), tmp_path / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    how: dict[str, Any] = {"out": out, "layers": [1, 2, 3], "workers": 1, "baselines": False}
    first = sweep(encoder, task, **how)
    (kept,) = (out / "together").glob("*.json")
    content = json.loads(kept.read_text())
    assert len(content["scores"]) == 3
    # Other numbers in each of the places show which one a score is from.
    content["scores"] = dict.fromkeys(content["scores"], 0.125)
    kept.write_text(json.dumps(content))
    assert set(scores(sweep(encoder, task, **how), task).values()) == {0.125}
    assert scores(sweep(encoder, task, scoring="mteb", **how), task) == pytest.approx(scores(first, task), abs=1e-4)
    content["of"]["mteb"] = "1.0"  # another mteb draws, or scores, in another way
    kept.write_text(json.dumps(content))
    again = sweep(encoder, task, **how)
    assert scores(again, task) == scores(first, task)
    kept.write_text("{")  # torn
    assert scores(sweep(encoder, task, **how), task) == scores(first, task)

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr(task_scoring, "layer_scores", fails)
    assert sweep(encoder, task, **how).frame.equals(again.frame)


def test_a_task_that_cannot_be_scored_together_is_scored_by_mteb_and_says_why(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = near(tmp_path)
    unusual = task_sources(path)[0].make()
    unusual.__class__ = type("Unusual", (type(unusual),), {"evaluate": lambda self, *a, **k: super(type(self), self).evaluate(*a, **k)})  # fmt: skip
    result = sweep(tiny_folder("Llama"), unusual, layers=[1, 2], out=tmp_path / "out", **QUICK)
    (way,) = result.notes.scoring.values()
    assert way == "by mteb, because it overrides `evaluate`"
    assert not confirmed(result)
    assert len(scores(result, path)) == 2

    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(task_scoring, "layer_scores", fails)
    reports: dict[str, tuple[int, int]] = {}
    broken = sweep(
        tiny_folder("Llama"), path, layers=[1, 2], out=tmp_path / "other",
        progress=lambda stage, *of: reports.update({stage: of}), **QUICK,
    )  # fmt: skip
    assert broken.notes.scoring == {task_sources(path)[0].name: "by mteb, because ZeroDivisionError: in the middle"}
    assert scores(broken, path) == pytest.approx(scores(result, path), abs=1e-6)
    assert reports["scoring"] == (2, 2)


def test_where_mteb_finds_another_score_the_page_says_so(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = near(tmp_path)
    plain = task_scoring.layer_scores
    monkeypatch.setattr(
        task_scoring, "layer_scores", lambda *a, **k: {layer: value + 0.02 for layer, value in plain(*a, **k).items()}
    )
    result = sweep(tiny_folder("Llama"), task, layers=[2], out=tmp_path / "out", **QUICK)
    (remark,) = result.notes.remarks
    assert remark.startswith("mteb scores near at layer 2 ")
    assert "sweep with scoring='mteb'" in remark
    monkeypatch.setattr(task_scoring, "layer_scores", lambda *a, **k: dict.fromkeys(plain(*a, **k), float("nan")))
    undefined = sweep(tiny_folder("Llama"), task, layers=[2], out=tmp_path / "nan", **QUICK)
    (remark,) = undefined.notes.remarks
    assert remark.startswith("No score at layer 2 of near: all vectors are the same or not finite there, or the task's")
    assert undefined.frame.filter(kind="score").is_empty()
    with pytest.raises(OptionError, match=r"no score to choose a layer by\. No score at layer 2 of near"):
        undefined.best()


def test_another_word_than_the_two_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`scoring` must be one of"):
        sweep(tiny_folder("Llama"), near(tmp_path), scoring="both", out=tmp_path / "out")  # type: ignore[arg-type]


def test_old_notes_are_read_without_it(tiny_folder: Folder, tmp_path: Path) -> None:
    sweep(tiny_folder("Llama"), out=tmp_path, device="cpu")
    notes = json.loads((tmp_path / "sweep.json").read_text())
    del notes["scoring"]
    (tmp_path / "sweep.json").write_text(json.dumps(notes))
    loaded = SweepResult.load(tmp_path)
    assert loaded.notes.scoring == {}
    assert isinstance(loaded.frame, pl.DataFrame)


def test_tfidf_is_scored_beside_the_layers_as_mteb_would_and_kept(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = ranks(tmp_path)
    how: dict[str, Any] = {"out": tmp_path / "out", "layers": [1], "workers": 1, "baselines": True}
    found = sweep(tiny_folder("Llama"), task, **how).notes.baselines
    (source,) = task_sources(task)
    assert found["TF-IDF"] == pytest.approx({source.name: tfidf_scores(source.make())}, abs=1e-4)
    monkeypatch.setattr(task_scoring.TaskScorer, "_baseline", None)  # the next run has nothing to score
    assert sweep(tiny_folder("Llama"), task, **how).notes.baselines == found


def test_texts_without_words_have_a_baseline_of_their_characters(tiny_folder: Folder, tmp_path: Path) -> None:
    pairs = [("+-", "+"), ("*/", "/="), ("=<", "<>"), ("+", "-"), ("**", "*"), ("<", "/")]
    rows = [{"sentence1": a, "sentence2": b, "score": n % 5} for n, (a, b) in enumerate(pairs)]
    path = tmp_path / "signs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = sweep(tiny_folder("Llama"), path, out=tmp_path / "out", layers=[1], workers=1)
    assert list(result.notes.baselines["TF-IDF"]) == [task_sources(path)[0].name]


class AtOnce:
    """An executor that runs a call as it is given, in this process: a worker's needs half a minute of imports."""

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        sent, words = pickle.loads(pickle.dumps((call, given)))  # as it would reach a process
        done.set_result(sent(*words))
        return done


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_are_confirmed_while_the_next_task_is_embedded_where_the_cores_are_free(
    processes: bool, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    tasks = [near(tmp_path / "tasks"), ranks(tmp_path / "tasks")]
    after = sweep(tiny_folder("Llama"), tasks, out=tmp_path / "after", **QUICK)
    monkeypatch.setattr(task_scoring.TaskScorer, "_cores_free", lambda _: True)
    monkeypatch.setattr(mteb_jobs.Workers, "run", lambda *_: iter(()))  # only what is begun beside is confirmed
    if not processes:
        monkeypatch.setattr(mteb_jobs.Workers, "_pool", lambda _: AtOnce())
        monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # a worker's own
    seen: list[tuple[str, int, int]] = []
    beside = sweep(
        tiny_folder("Llama"), tasks, out=tmp_path / "beside", progress=lambda *report: seen.append(report),
        **{**QUICK, "workers": 2},
    )  # fmt: skip
    assert beside.frame.equals(after.frame)
    assert beside.frame.filter(kind="confirmed").height >= 4
    assert [report for report in seen if report[0] == "confirming"][-1][1:] == (
        beside.frame.filter(kind="confirmed").height,
    ) * 2


@pytest.mark.slow
def test_a_task_with_other_settings_is_scored_anew(tiny_folder: Folder, tmp_path: Path) -> None:
    from midlayer_encoders.tasks import resolve_tasks

    words = [f"{word} {number}" for word in ("apple", "stone", "river") for number in range(40)]
    rows = [{"text": text, "label": "ab"[zlib.crc32(text.encode()) % 2]} for text in words]  # nothing to be learned
    path = tmp_path / "kinds"
    path.mkdir()
    for split, part in (("train", rows[::2]), ("test", rows[1::2])):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def found(count: int, out: str) -> float:
        (task,) = resolve_tasks(path)
        task.samples_per_label = count  # type: ignore[attr-defined]
        result = sweep(tiny_folder("Llama"), task, out=tmp_path / out, layers=[3], **QUICK)
        return float(result.frame.filter(kind="score")["value"].item())

    one, twelve = found(1, "one"), found(12, "twelve")
    assert one != twelve
    assert found(1, "shared") == one
    assert found(12, "shared") == twelve  # not what was kept there
