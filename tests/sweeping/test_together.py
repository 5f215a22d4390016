"""A sweep that scores all layers together: layers confirmed by mteb, saved scores, and tasks left to mteb."""

import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import dump_with_checksum, read_with_checksum
from midlayer_encoders.sweeping import SweepResult, mteb_jobs, task_scoring
from midlayer_encoders.tasks import tfidf_scores
from midlayer_encoders.tasks.sources import task_sources
from tests.support.families import DEPTH
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, layer_scores_of, sweep, write_reranking_task, write_sts_task

pytestmark = MTEB


def confirmed_scores(result: SweepResult) -> dict[int, float]:
    return dict(result.frame.filter(kind="confirmed").select("layer", "value").iter_rows())


def test_mteb_confirms_the_best_second_best_and_last_layer_only(tiny_folder: Folder, tmp_path: Path) -> None:
    task = write_sts_task(tmp_path)
    result = sweep(tiny_folder("Llama"), task, out=tmp_path / "out", **QUICK)
    scores_by_layer, checked = layer_scores_of(result, task), confirmed_scores(result)
    first, second = sorted(scores_by_layer, key=lambda layer: -scores_by_layer[layer])[:2]
    assert set(checked) == {first, second, DEPTH}
    assert checked == pytest.approx({layer: scores_by_layer[layer] for layer in checked}, abs=1e-4)
    assert len(list((tmp_path / "out/mteb").rglob("near-*.json"))) == len(checked)
    assert result.notes.scoring == {task_sources(task)[0].name: "all layers together"}
    page = result.to_html().read_text()
    assert f"mteb confirmed {len(checked)} scores: they differ by at most 0.0" in page
    assert "the best, the second best and the last confirmed by mteb" in page
    by_mteb = sweep(tiny_folder("Llama"), task, out=tmp_path / "mteb", scoring="mteb", **QUICK)
    assert layer_scores_of(by_mteb, task) == pytest.approx(scores_by_layer, abs=1e-4)
    assert not confirmed_scores(by_mteb)
    assert "mteb confirmed" not in by_mteb.html()
    assert by_mteb.notes.how["scoring"] == "near by mteb, because it was requested"


@pytest.mark.slow
def test_scores_of_one_method_are_not_reused_for_the_other(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = write_reranking_task(tmp_path), tmp_path / "out"
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    options: dict[str, Any] = {"out": out, "layers": [1, 2, 3], "workers": 1, "baselines": False}
    first = sweep(encoder, task, **options)
    (saved,) = (out / "together").glob("*.json")
    content = read_with_checksum(saved)
    assert len(content["scores"]) == 4  # and the tokens per text
    # Different numbers in each file show where a score comes from.
    content["scores"] = {key: [0.125] for key in content["scores"]}
    saved.write_bytes(dump_with_checksum(content))
    assert set(layer_scores_of(sweep(encoder, task, **options), task).values()) == {0.125}
    assert layer_scores_of(sweep(encoder, task, scoring="mteb", **options), task) == pytest.approx(
        layer_scores_of(first, task), abs=1e-4
    )
    content["of"]["mteb"] = "1.0"  # another mteb version may sample or score differently
    saved.write_bytes(dump_with_checksum(content))
    rescored = sweep(encoder, task, **options)
    assert layer_scores_of(rescored, task) == layer_scores_of(first, task)
    saved.write_text("{")  # torn
    assert layer_scores_of(sweep(encoder, task, **options), task) == layer_scores_of(first, task)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr(task_scoring, "resampled_scores", fail)
    assert sweep(encoder, task, **options).frame.equals(rescored.frame)


@pytest.mark.long
def test_task_that_cannot_be_scored_together_is_left_to_mteb_with_the_reason(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sts_task(tmp_path)
    unusual = task_sources(path)[0].make()
    unusual.__class__ = type("Unusual", (type(unusual),), {"evaluate": lambda self, *a, **k: super(type(self), self).evaluate(*a, **k)})  # fmt: skip
    result = sweep(tiny_folder("Llama"), unusual, layers=[1, 2], out=tmp_path / "out", **QUICK)
    (method,) = result.notes.scoring.values()
    assert method == "by mteb, because it overrides `evaluate`"
    assert not confirmed_scores(result)
    assert len(layer_scores_of(result, path)) == 2

    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("in the middle")

    monkeypatch.setattr(task_scoring, "resampled_scores", fails)
    reports: dict[str, tuple[int, int]] = {}
    broken = sweep(
        tiny_folder("Llama"), path, layers=[1, 2], out=tmp_path / "other",
        progress=lambda stage, *counts: reports.update({stage: counts}), **QUICK,
    )  # fmt: skip
    assert broken.notes.scoring == {task_sources(path)[0].name: "by mteb, because ZeroDivisionError: in the middle"}
    assert layer_scores_of(broken, path) == pytest.approx(layer_scores_of(result, path), abs=1e-6)
    assert reports["scoring"] == (2, 2)


@pytest.mark.long
def test_page_reports_scores_that_differ_from_mteb(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_sts_task(tmp_path)
    original_scores = task_scoring.resampled_scores
    monkeypatch.setattr(
        task_scoring,
        "resampled_scores",
        lambda *a, **k: {
            layer: [value + 0.02 for value in values] for layer, values in original_scores(*a, **k).items()
        },
    )
    result = sweep(tiny_folder("Llama"), task, layers=[2], out=tmp_path / "out", **QUICK)
    (remark,) = result.notes.remarks
    assert remark.startswith("mteb scores near at layer 2 ")
    assert "sweep with scoring='mteb'" in remark


@pytest.mark.long
@pytest.mark.parametrize("scoring", ["together", "mteb"])
def test_sweep_equal_vectors_of_a_task_are_a_failure_with_the_reason(
    scoring: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("Llama"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.zeros_like(weight) for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    task = write_sts_task(tmp_path)
    undefined = sweep(str(folder), task, layers=[1, 2], out=tmp_path / "out", scoring=scoring, **QUICK)
    assert undefined.frame.filter(kind="score").is_empty()
    reason = "no layer has a score: all vectors are the same or not finite there, or the task's labels do not differ."
    assert list(undefined.failures.values()) == [reason]
    with pytest.raises(OptionError, match=r"no score to choose a layer by\. near-.*: no layer has a score"):
        undefined.best()


def test_unknown_scoring_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`scoring` must be one of"):
        sweep(tiny_folder("Llama"), write_sts_task(tmp_path), scoring="both", out=tmp_path / "out")  # type: ignore[arg-type]


@pytest.mark.long
def test_tfidf_matches_mteb_and_is_reused(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_reranking_task(tmp_path)
    options: dict[str, Any] = {"out": tmp_path / "out", "layers": [1], "workers": 1, "baselines": True}
    baselines = sweep(tiny_folder("Llama"), task, **options).notes.baselines
    (source,) = task_sources(task)
    assert baselines["TF-IDF"] == pytest.approx({source.name: tfidf_scores(source.make())}, abs=1e-4)
    monkeypatch.setattr(task_scoring.TaskScorer, "_baseline", None)  # the next run has nothing to score
    assert sweep(tiny_folder("Llama"), task, **options).notes.baselines == baselines


def test_texts_without_words_have_a_character_baseline(tiny_folder: Folder, tmp_path: Path) -> None:
    pairs = [("+-", "+"), ("*/", "/="), ("=<", "<>"), ("+", "-"), ("**", "*"), ("<", "/")]
    rows = [{"sentence1": a, "sentence2": b, "score": n % 5} for n, (a, b) in enumerate(pairs)]
    path = tmp_path / "signs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = sweep(tiny_folder("Llama"), path, out=tmp_path / "out", layers=[1], workers=1)
    assert list(result.notes.baselines["TF-IDF"]) == [task_sources(path)[0].name]


class ImmediateExecutor:
    """An executor that runs calls immediately in this process, since a worker needs half a minute of imports."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        function, arguments = pickle.loads(pickle.dumps((call, args)))  # as a process would receive it
        future.set_result(function(*arguments))
        return future


@pytest.mark.long
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_are_confirmed_while_the_next_task_is_embedded(
    processes: bool, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks").mkdir()
    tasks = [write_sts_task(tmp_path / "tasks"), write_reranking_task(tmp_path / "tasks")]
    sequential = sweep(tiny_folder("Llama"), tasks, out=tmp_path / "after", **QUICK)
    monkeypatch.setattr(task_scoring.TaskScorer, "_has_idle_cores", True)
    run = mteb_jobs.Workers.run

    def run_begun(workers: mteb_jobs.Workers, jobs: Any, futures: Any) -> Any:
        assert len(futures) == len(jobs)
        return run(workers, jobs, futures)

    monkeypatch.setattr(mteb_jobs.Workers, "run", run_begun)
    if not processes:
        monkeypatch.setattr(mteb_jobs.Workers, "_pool", lambda _: ImmediateExecutor())
    reports: list[tuple[str, int, int]] = []
    concurrent = sweep(
        tiny_folder("Llama"), tasks, out=tmp_path / "beside", progress=lambda *report: reports.append(report),
        **{**QUICK, "workers": 2},
    )  # fmt: skip
    assert concurrent.frame.equals(sequential.frame)
    assert concurrent.frame.filter(kind="confirmed").height >= 4
    assert [report for report in reports if report[0] == "confirming"][-1][1:] == (
        concurrent.frame.filter(kind="confirmed").height,
    ) * 2


@pytest.mark.slow
def test_task_with_other_settings_is_scored_again(tiny_folder: Folder, tmp_path: Path) -> None:
    from midlayer_encoders.tasks import resolve_tasks

    texts = [f"{word} {number}" for word in ("apple", "stone", "river") for number in range(40)]
    rows = [{"text": text, "label": "ab"[zlib.crc32(text.encode()) % 2]} for text in texts]  # random labels
    path = tmp_path / "kinds"
    path.mkdir()
    for split, part in (("train", rows[::2]), ("test", rows[1::2])):
        (path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))

    def score_with(count: int, out: str) -> float:
        (task,) = resolve_tasks(path)
        task.samples_per_label = count  # type: ignore[attr-defined]
        result = sweep(tiny_folder("Llama"), task, out=tmp_path / out, layers=[3], **QUICK)
        return float(result.frame.filter(kind="score")["value"].item())

    score_1, score_12 = score_with(1, "one"), score_with(12, "twelve")
    assert score_1 != score_12
    assert score_with(1, "shared") == score_1
    assert score_with(12, "shared") == score_12  # not the saved score
