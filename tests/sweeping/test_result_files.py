"""What a sweep keeps may be torn, empty or a link, and two may ask for one folder: nothing is wrong, nothing stays stuck."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError
from midlayer_encoders.sweeping import SweepResult, mteb_jobs
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, near, sweep
from tests.tasks.rows import ROWS, write

Folder = Callable[[str], str]
pytestmark = MTEB

HERE: dict[str, Any] = {key: value for key, value in QUICK.items() if key != "device"} | {"layers": [3]}


def far(root: Path) -> Path:
    return write(root / "far.jsonl", ROWS["STS"][:20])


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=64)


KEPT = {
    "mteb/**/near-*.json": ["", "{", "[]", "{}", '{"task_name": "near", "scores": {}}'],
    "mteb/**/run_settings.jsonl": ['{"task": "ne', "{}\n{", "[", "half"],
    "embeddings/*/plans/*.json": ["", "[[0, 1", "{}", "[[0, 99999]]", '[["a"]]', "[3]"],
    "embeddings/*/store.json": ["", "{", "{}", "[]"],
    "sweep.json": ["", "{", "{}", "[]"],
    "frame.parquet": ["", "PAR1", "PAR1 half PAR1"],
}
"""What a sweep reads again, and what of it may be left after a power cut."""


@pytest.mark.parametrize("turns", [range(2), pytest.param(range(2, 6), marks=pytest.mark.slow)])
def test_torn_files_are_set_aside_by_name_and_made_again(
    turns: range, encoder: LayerEncoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, out = near(tmp_path), tmp_path / "out"
    first = sweep(encoder, task, out=out, **HERE)
    for turn in turns:
        caplog.clear()
        torn = {path: words[turn % len(words)] for pattern, words in KEPT.items() for path in out.glob(pattern)}
        assert len(torn) == len(KEPT)
        for path, content in torn.items():
            path.write_text(content)
        for path in out.glob("embeddings/*/*.safetensors"):
            path.unlink()
        with pytest.raises(OptionError, match="has no readable"):
            SweepResult.load(out)
        again = sweep(encoder, task, out=out, **HERE)
        assert not again.failures
        assert again.frame.equals(first.frame)
        assert SweepResult.load(out).frame.equals(first.frame)
        for path, content in torn.items():
            aside = path.with_name(f"{path.name}.broken")
            assert aside.read_text() == content
            assert f"{path} could not be read" in caplog.text
            aside.unlink()
    caplog.clear()
    assert sweep(encoder, task, out=out, **HERE).frame.equals(first.frame)
    assert not caplog.text


def test_mteb_s_files_are_the_ones_that_mteb_writes(encoder: LayerEncoder, tmp_path: Path) -> None:
    """The same names and contents, but for times, and two tasks of a layer in one file of settings."""
    import mteb
    from mteb.cache import ResultCache

    from midlayer_encoders.sweeping.mteb_jobs import ResultFiles
    from midlayer_encoders.tasks import task_sources

    found = {}
    for kind in (ResultCache, ResultFiles):
        cache = kind(tmp_path / kind.__name__)
        for path in (near(tmp_path), far(tmp_path)):
            task = task_sources(path)[0].make()
            mteb.evaluate(encoder, task, cache=cache, show_progress_bar=False, co2_tracker=False)
        root = tmp_path / kind.__name__
        found[kind] = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
    assert found[ResultCache].keys() == found[ResultFiles].keys()
    assert len(found[ResultCache]) == 4
    for name, path in found[ResultCache].items():
        if name.endswith(".jsonl"):
            assert path.read_text() == found[ResultFiles][name].read_text()
            assert len(path.read_text().splitlines()) == 2
        elif "model_meta" not in name:
            one, other = (json.loads(each.read_text()) for each in (path, found[ResultFiles][name]))
            assert one["scores"] == other["scores"]
            assert one.keys() == other.keys()


def test_links_in_out_are_not_written_through(encoder: LayerEncoder, tmp_path: Path) -> None:
    task, out, mine = near(tmp_path), tmp_path / "out", tmp_path / "mine"
    first = sweep(encoder, task, out=out, **HERE)
    mine.mkdir()
    linked = [path for path in out.rglob("*") if path.is_file() and path.suffix not in (".lock", ".broken")]
    assert len(linked) == 10
    for number, path in enumerate(linked):
        (mine / str(number)).write_text("mine")
        path.unlink()
        path.symlink_to(mine / str(number))
    (tmp_path / "named").symlink_to(out)
    again = sweep(encoder, task, out=tmp_path / "named", **HERE)
    assert again.frame.equals(first.frame)
    assert {path.read_text() for path in mine.iterdir()} == {"mine"}
    assert len(list(mine.iterdir())) == len(linked)
    (tmp_path / "big").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "embeddings").symlink_to(tmp_path / "big")
    with pytest.raises(
        OptionError,
        match=r"embeddings is a link to .*big: remove the link, or pass its target as `out` \(or as `store`",
    ):
        sweep(encoder, task, out=tmp_path / "other", **HERE)
    assert not list((tmp_path / "big").iterdir())
    assert sweep(encoder, task, out=tmp_path / "other", store=tmp_path / "big", **HERE).frame.equals(first.frame)


def test_a_second_sweep_into_one_folder_is_refused_at_once(
    encoder: LayerEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, out = near(tmp_path), tmp_path / "out"
    inside, go_on = threading.Event(), threading.Event()
    scored = mteb_jobs.run_job

    def waits(*given: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return scored(*given)

    monkeypatch.setattr("midlayer_encoders.sweeping.mteb_jobs.run_job", waits)
    found: list[SweepResult] = []
    thread = threading.Thread(target=lambda: found.append(sweep(encoder, task, out=out, **HERE)))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(
        FolderError, match=rf"{out} is in use: process {os.getpid()} on .* is writing there. Wait until"
    ):
        sweep(encoder, task, out=out, **HERE)
    go_on.set()
    thread.join(60)
    assert sweep(encoder, task, out=out, **HERE).frame.equals(found[0].frame)


def _ends(job: mteb_jobs.Job) -> mteb_jobs.Score:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(job)


@pytest.mark.slow
def test_a_killed_worker_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mteb_jobs, "_run_in_worker", _ends)
    with pytest.raises(MidlayerError, match=r"A worker process was killed .* run again, with fewer `workers`"):
        list(mteb_jobs.Workers(2, 2).run([1, 2]))  # type: ignore[list-item]
    monkeypatch.setattr(mteb_jobs, "_run_in_worker", abs)
    assert sorted(mteb_jobs.Workers(2, 2).run([-1, 2])) == [1, 2]  # type: ignore[list-item, type-var]
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)


def test_a_full_disk_ends_a_sweep_and_it_goes_on_when_there_is_room(encoder: LayerEncoder, small_disk: Path) -> None:
    (small_disk.parent / "tasks").mkdir()
    tasks = [near(small_disk.parent / "tasks"), far(small_disk.parent / "tasks")]
    whole = sweep(encoder, tasks, out=small_disk.parent / "whole", **HERE)
    out, filler = small_disk / "out", small_disk / "filler"
    errors = []
    for free in (8, 24, 36):  # KiB
        filler.write_bytes(bytes(2**20 - used(small_disk) - free * 1024))
        try:
            sweep(encoder, tasks, out=out, **HERE)
        except DiskFullError as error:
            errors.append(str(error))
        filler.unlink()
        assert not [path for path in out.rglob("*") if path.suffix in (".tmp", ".broken")]
    assert len(errors) >= 2
    assert all(f"The disk of {small_disk} is full" in error and f": {out}/" in error for error in errors)
    assert sweep(encoder, tasks, out=out, **HERE).frame.equals(whole.frame)
    assert pl.read_parquet(out / "frame.parquet").equals(whole.frame)


def used(folder: Path) -> int:
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.mark.parametrize(
    "pattern",
    [
        "mteb/**/near-*.json",
        "embeddings/*/store.json",
        "frame.parquet",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("sweep.json", "frame.csv", "midlayer.lock")),
    ],
)
def test_a_folder_in_the_place_of_a_file_is_named_and_moved_away_by_hand(
    pattern: str, encoder: LayerEncoder, tmp_path: Path
) -> None:
    task, out = near(tmp_path), tmp_path / "out"
    first = sweep(encoder, task, out=out, **HERE)
    (path,) = out.glob(pattern)
    path.unlink()
    path.mkdir()
    for shard in out.glob("embeddings/*/*.safetensors"):
        shard.unlink()
    with pytest.raises(FolderError, match=rf"{path} must be a file, but is a folder"):
        sweep(encoder, task, out=out, **HERE)
    path.rmdir()
    assert sweep(encoder, task, out=out, **HERE).frame.equals(first.frame)


@pytest.mark.slow
def test_joblib_works_as_before_after_workers_ran() -> None:
    assert list(mteb_jobs.Workers(2, 2).run([])) == []
    begun = mteb_jobs.Workers(2, 2)._pool().submit(abs, -1)
    assert begun.result() == 1
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(number) for number in (-1, 2)) == [1, 2]
