"""A sweep on samples: mteb's score of the sample, results that never mix with others, and what the sample saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from midlayer_encoders import LayerEncoder, board, sweep_many
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.scaling.sweep_units import sweep_units
from midlayer_encoders.sweeping import SweepResult, mteb_jobs
from midlayer_encoders.sweeping.mteb_jobs import Prompts
from midlayer_encoders.sweeping.sweeps import Sweep
from midlayer_encoders.tasks.sources import SampledSource, task_sources
from tests.scaling.jobs import Jobs
from tests.support.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, layer_scores_of, sweep
from tests.tasks.rows import ROWS, write

Folder = Callable[[str], str]
pytestmark = MTEB


def scores(result: SweepResult) -> dict[tuple[str, int], float]:
    """Return the scores by task and layer."""
    return {(task, layer): x for task, layer, x in result.scores.select("dataset", "layer", "value").iter_rows()}


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_scores_are_those_of_mteb_on_the_sample(tiny_folder: Folder, tmp_path: Path, kind: str) -> None:
    import mteb

    path = write(tmp_path / "rows.jsonl", ROWS[kind])
    folder = tiny_folder("BERT")
    result = sweep(folder, path, layers=[1, 3], out=tmp_path / "out", limit=12, **QUICK)
    with isolated_random():
        task = SampledSource(task_sources(path)[0], 12).make()
        expected = mteb.evaluate(LayerEncoder(folder, 3, device="cpu"), task, cache=None, show_progress_bar=False)
    values = layer_scores_of(result, path)
    assert values[3] == pytest.approx(expected[0].get_score(), abs=1e-4)
    assert result.notes.failures == {}
    confirmed = result.frame.filter(kind="confirmed")
    assert {row["layer"] for row in confirmed.iter_rows(named=True)} == {1, 3}
    for row in confirmed.iter_rows(named=True):
        assert row["value"] == pytest.approx(values[row["layer"]], abs=1e-4)


@pytest.mark.long
def test_a_folder_holds_full_and_limited_scores_apart(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    arguments: dict[str, Any] = {"layers": [1, 3], "out": tmp_path / "out", "store": tmp_path / "store", **QUICK}
    name = task_sources(path)[0].name
    full = scores(sweep(tiny_folder("BERT"), path, **arguments))
    limited = scores(sweep(tiny_folder("BERT"), path, limit=12, **arguments))
    larger = scores(sweep(tiny_folder("BERT"), path, limit=24, **arguments))
    again = scores(sweep(tiny_folder("BERT"), path, **arguments))
    assert {task for task, _ in full} == {name}
    assert {task for task, _ in limited} == {f"{name}[12]"}
    assert {task for task, _ in larger} == {f"{name}[24]"}
    assert len({tuple(values.values()) for values in (full, limited, larger)}) == 3
    assert again == full
    assert len(list((tmp_path / "store").rglob("*.safetensors"))) == 1, "the samples' texts were embedded before"
    for folder in ("together", "mteb"):
        files = {file.name for file in (tmp_path / "out" / folder).rglob("*.json")}
        assert {f"{name}.json", f"{name}[12].json"} <= files


def test_a_limited_sweep_is_resumed(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    arguments: dict[str, Any] = {"layers": [1, 3], "out": tmp_path / "out", "limit": 12, **QUICK}
    first = sweep(tiny_folder("BERT"), path, **arguments)
    monkeypatch.setattr(mteb_jobs.mteb, "evaluate", _only_cached(mteb_jobs.mteb.evaluate))
    monkeypatch.setattr("midlayer_encoders.sweeping.task_scoring.record", _unexpected)
    again = sweep(tiny_folder("BERT"), path, **arguments)
    assert_frame_equal(again.frame, first.frame)
    assert again.notes.rows == first.notes.rows == {f"{task_sources(path)[0].name}[12]": {"test": [12, 48, 2]}}


def _only_cached(evaluate: Any) -> Any:
    def cached(*args: Any, **options: Any) -> Any:
        assert options.get("overwrite_strategy") == "only-cache"
        return evaluate(*args, **options)

    return cached


def _unexpected(*_: Any, **__: Any) -> Any:
    raise AssertionError("the scores were saved")


@pytest.mark.long
def test_a_limit_above_the_rows_has_the_scores_of_all_rows(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS["Classification"])
    arguments: dict[str, Any] = {"layers": [3], "store": tmp_path / "store", **QUICK}
    full = scores(sweep(tiny_folder("BERT"), path, out=tmp_path / "full", **arguments))
    result = sweep(tiny_folder("BERT"), path, out=tmp_path / "limited", limit=1000, **arguments)
    limited = scores(result)
    assert result.sample_words() == []
    assert limited == {(f"{task}[1000]", layer): value for (task, layer), value in full.items()}


@pytest.mark.long
def test_the_result_tells_what_was_saved(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    result = sweep(tiny_folder("BERT"), path, layers=[1, 3], out=tmp_path / "out", limit=12, **QUICK)
    saved, words = result.sample_words()
    tokens = 36 * 2 * result.notes.tokens[f"{task_sources(path)[0].name}[12]"]
    assert (
        saved
        == f"Scored on a sample of 12 of 48 rows (25%); about {float(f'{tokens:.2g}'):,.0f} tokens (75%) were not read."
    )
    best = result.best()
    (samples,) = result.resamples.filter(layer=int(best))["values"].to_list()
    low, high = (100 * pl.Series(samples).quantile(q, "linear") for q in (0.025, 0.975))  # type: ignore[operator]
    interval = f"{low:.1f} to {high:.1f}".replace("-", "−")
    assert words == f"Layer {best} has {best.score:.1f} points on it (95 % interval {interval}).".replace(" -", " −")
    assert words.replace("95 %", "95\N{NO-BREAK SPACE}%") in result.html()
    assert SweepResult.load(tmp_path / "out").sample_words() == [saved, words]
    whole = sweep(tiny_folder("BERT"), path, layers=[1, 3], out=tmp_path / "whole", **QUICK)
    assert whole.sample_words() == []


def test_a_board_does_not_compare_a_sample_with_all_rows(tiny_folder: Folder, tmp_path: Path) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    for name, limit in {"BERT": None, "Llama": 12}.items():
        sweep(tiny_folder(name), path, layers=[1, 3], out=tmp_path / name, limit=limit, **QUICK)
    with pytest.raises(OptionError, match=r"BERT0: near; .*Llama0: near\[12\]"):
        board([tmp_path / "BERT", tmp_path / "Llama"])


def test_a_sample_has_the_prompt_of_its_task(tiny_folder: Folder) -> None:
    from mteb import get_task

    prompts = Prompts(
        LayerEncoder(tiny_folder("BERT"), -1, device="cpu", prompts={"STS12": "near: ", "STS": "other: "})
    )
    metadata = get_task("STS12").metadata
    limited = metadata.model_copy(update={"name": "STS12[500]"})
    assert prompts.choose(metadata, None) == prompts.choose(limited, None) == "near: "


@pytest.mark.long
def test_jobs_of_samples_are_other_jobs(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    model = tiny_folder("BERT")
    out = tmp_path / "out"
    requests = [Sweep(model, path, out=out, limit=limit) for limit in (None, 12, 24)]
    identities = [{unit.outcome for unit in sweep_units("m", request)} for request in requests]
    assert not set.intersection(*identities)
    arguments: dict[str, Any] = {"layers": [1, 3], "limit": 12, "baselines": False, "device": "cpu"}
    expected = sweep(model, path, out=tmp_path / "one", **arguments)
    (result,) = sweep_many([model], str(path), out=tmp_path / "many", executor=Jobs(), **arguments).values()
    assert_frame_equal(result.frame, expected.frame)
