"""Files of a sweep may be torn, empty or links, and two sweeps may use one folder: results stay correct, and nothing blocks."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError
from midlayer_encoders.sweeping import SweepResult, mteb_jobs
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, sweep, write_sts_task
from tests.tasks.rows import ROWS, write

pytestmark = MTEB

IN_MEMORY: dict[str, Any] = {key: value for key, value in QUICK.items() if key != "device"} | {"layers": [3]}


def write_other_sts_task(root: Path) -> Path:
    return write(root / "far.jsonl", ROWS["STS"][:20])


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=64)


TORN_CONTENTS = {
    "mteb/**/near-*.json": ["", "{", "[]", "{}", '{"task_name": "near", "scores": {}}'],
    "embeddings/*/plans/*.json": ["", "[[0, 1", "{}", "[[0, 99999]]", '[["a"]]', "[3]"],
    "embeddings/*/store.json": ["", "{", "{}", "[]"],
    "sweep.json": ["", "{", "{}", "[]"],
    "frame.parquet": ["", "PAR1", "PAR1 half PAR1"],
}
"""Files that a sweep reads again, and contents they may have after a power cut."""


@pytest.mark.long
@pytest.mark.parametrize("rounds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.slow)])
def test_torn_files_are_set_aside_and_created_again(
    rounds: range, encoder: LayerEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    first = sweep(encoder, task, out=out, **IN_MEMORY)
    for round_number in rounds:
        caplog.clear()
        torn = {
            path: contents[round_number % len(contents)]
            for pattern, contents in TORN_CONTENTS.items()
            for path in out.glob(pattern)
        }
        assert len(torn) == len(TORN_CONTENTS)
        for path, content in torn.items():
            path.write_text(content)
        for path in out.glob("embeddings/*/*.safetensors"):
            path.unlink()
        with pytest.raises(OptionError, match="has no readable"):
            SweepResult.load(out)
        repeated = sweep(encoder, task, out=out, **IN_MEMORY)
        assert not repeated.failures
        assert repeated.frame.equals(first.frame)
        assert SweepResult.load(out).frame.equals(first.frame)
        for path, content in torn.items():
            broken = path.with_name(f"{path.name}.broken")
            assert broken.read_text() == content
            assert f"{path} could not be read" in caplog.text
            broken.unlink()
    caplog.clear()
    assert sweep(encoder, task, out=out, **IN_MEMORY).frame.equals(first.frame)
    assert not caplog.text


def test_results_of_two_layers_that_are_swapped_are_created_again(encoder: LayerEncoder, tmp_path: Path) -> None:
    options = IN_MEMORY | {"layers": [1, 3], "scoring": "mteb"}
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    first = sweep(encoder, task, out=out, **options)
    path, other_path = out.glob("mteb/**/near-*.json")
    content = path.read_bytes()
    path.write_bytes(other_path.read_bytes())
    other_path.write_bytes(content)
    again, repeated = (sweep(encoder, task, out=out, **options) for _ in range(2))
    assert again.frame.equals(first.frame)
    assert [result.num_kept for result in (first, again, repeated)] == [0, 0, 2]


@pytest.mark.long
def test_mteb_reads_the_files_as_its_own(encoder: LayerEncoder, tmp_path: Path) -> None:
    import mteb
    from mteb.cache import ResultCache

    from midlayer_encoders.tasks.sources import task_sources

    path = write_sts_task(tmp_path)
    cache = ResultCache(tmp_path / "cache")
    expected = mteb.evaluate(encoder, task_sources(path)[0].make(), cache=cache, show_progress_bar=False)[0]
    sweep(encoder, path, out=tmp_path / "out", **IN_MEMORY | {"layers": [4]})
    found = ResultCache(tmp_path / "out/mteb")
    written, others = (
        {str(path.relative_to(each.cache_path)) for path in each.cache_path.rglob("*.json")} for each in (found, cache)
    )
    assert written == others
    (file,) = found.cache_path.rglob("near-*.json")
    actual = mteb.TaskResult.from_disk(file)
    assert actual.get_score() == pytest.approx(expected.get_score(), abs=1e-4)
    assert actual.scores.keys() == expected.scores.keys()
    assert found.load_results().to_dataframe().shape[0] == 1


@pytest.mark.long
def test_links_in_the_output_folder_are_not_written_through(encoder: LayerEncoder, tmp_path: Path) -> None:
    task, out, target = write_sts_task(tmp_path), tmp_path / "out", tmp_path / "mine"
    first = sweep(encoder, task, out=out, **IN_MEMORY)
    target.mkdir()
    linked = [path for path in out.rglob("*") if path.is_file() and path.suffix not in (".lock", ".broken")]
    assert len(linked) == 10
    for number, path in enumerate(linked):
        (target / str(number)).write_text("mine")
        path.unlink()
        path.symlink_to(target / str(number))
    (tmp_path / "named").symlink_to(out)
    repeated = sweep(encoder, task, out=tmp_path / "named", **IN_MEMORY)
    assert repeated.frame.equals(first.frame)
    assert {path.read_text() for path in target.iterdir()} == {"mine"}
    assert len(list(target.iterdir())) == len(linked)


def test_second_sweep_into_the_same_folder_is_refused(
    encoder: LayerEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    inside, go_on = threading.Event(), threading.Event()
    original_run_job = mteb_jobs.run_job

    def waiting_run_job(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return original_run_job(*args)

    monkeypatch.setattr("midlayer_encoders.sweeping.mteb_jobs.run_job", waiting_run_job)
    results: list[SweepResult] = []
    thread = threading.Thread(target=lambda: results.append(sweep(encoder, task, out=out, **IN_MEMORY)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(
        FolderError, match=rf"{out} is in use: process {os.getpid()} on .* is writing there. Wait until"
    ):
        sweep(encoder, task, out=out, **IN_MEMORY)
    go_on.set()
    thread.join(60)
    assert sweep(encoder, task, out=out, **IN_MEMORY).frame.equals(results[0].frame)


def _kill_worker(job: mteb_jobs.Job) -> mteb_jobs.Score:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(job)


@pytest.mark.slow
def test_killed_worker_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = mteb_jobs.Workers(2, 2)
    monkeypatch.setattr(mteb_jobs, "_run_in_worker", _kill_worker)
    with pytest.raises(MidlayerError, match=r"A worker process was killed .* run again, with fewer `workers`"):
        list(workers.run([], workers.begin([1, 2])))  # type: ignore[list-item]
    monkeypatch.setattr(mteb_jobs, "_run_in_worker", abs)
    assert sorted(workers.run([], workers.begin([-1, 2]))) == [1, 2]  # type: ignore[list-item, type-var]
    mteb_jobs.Workers.kill()


@pytest.mark.long
def test_full_disk_stops_a_sweep_which_can_be_resumed(encoder: LayerEncoder, small_disk: Path) -> None:
    (small_disk.parent / "tasks").mkdir()
    tasks = [write_sts_task(small_disk.parent / "tasks"), write_other_sts_task(small_disk.parent / "tasks")]
    expected = sweep(encoder, tasks, out=small_disk.parent / "whole", **IN_MEMORY)
    out, filler = small_disk / "out", small_disk / "filler"
    errors = []
    for free in (8, 24, 36):  # KiB
        filler.write_bytes(bytes(2**20 - used_bytes(small_disk) - free * 1024))
        try:
            sweep(encoder, tasks, out=out, **IN_MEMORY)
        except DiskFullError as error:
            errors.append(str(error))
        filler.unlink()
        assert not [path for path in out.rglob("*") if path.suffix in (".tmp", ".broken")]
    assert len(errors) >= 2
    assert all(f"The disk of {small_disk} is full" in error and f": {out}/" in error for error in errors)
    assert sweep(encoder, tasks, out=out, **IN_MEMORY).frame.equals(expected.frame)
    assert pl.read_parquet(out / "frame.parquet").equals(expected.frame)


def used_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.mark.parametrize(
    "pattern",
    [
        "mteb/**/near-*.json",
        "embeddings/*/store.json",
        "frame.parquet",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sweep.json", "frame.csv", "midlayer.lock")),
    ],
)
def test_folder_in_place_of_a_file_is_refused(pattern: str, encoder: LayerEncoder, tmp_path: Path) -> None:
    task, out = write_sts_task(tmp_path), tmp_path / "out"
    first = sweep(encoder, task, out=out, **IN_MEMORY)
    (path,) = out.glob(pattern)
    path.unlink()
    path.mkdir()
    for shard in out.glob("embeddings/*/*.safetensors"):
        shard.unlink()
    with pytest.raises(FolderError, match=rf"{path} cannot be written \(Is a directory\)"):
        sweep(encoder, task, out=out, **IN_MEMORY)
    path.rmdir()
    assert sweep(encoder, task, out=out, **IN_MEMORY).frame.equals(first.frame)


def test_there_are_no_more_processes_than_jobs_or_cores() -> None:
    assert [mteb_jobs.Workers(16, jobs).count for jobs in (0, 3, 6, 18)] == [1, 3, 6, 16]
