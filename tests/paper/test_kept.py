"""`reproduce` reuses nothing from a failed sweep, after a file changed, or from a torn file."""

import json
import os
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from benchmarks.paper.command import app
from benchmarks.paper.reproduce import EXPERIMENTS, reproduce
from benchmarks.paper.setting import Setting
from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import FolderError, MidlayerError, OptionError
from midlayer_encoders.files import folder_lock
from tests.support.families import tiny
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import save_tiny
from tests.tasks.rows import ROWS, write

pytestmark = MTEB


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Return a setting whose only experiment returns the scores of its sweep."""
    short = [
        {key: value[:30] if isinstance(value, str) else value for key, value in row.items()} for row in ROWS["STS"]
    ]
    task = write(tmp_path / "near.jsonl", short)
    for name in ("fig6", "fig7"):
        own_rows = replace(EXPERIMENTS[name], run=_scores, draw=lambda _: None, describe=lambda _: [])
        monkeypatch.setitem(EXPERIMENTS, name, own_rows)
    monkeypatch.setattr("benchmarks.paper.reproduce.write_figure", lambda *_, **__: None)
    return Setting(
        models=(save_tiny("Llama", tmp_path / "model"),), load=_load, out=tmp_path / "out", tasks=str(task),
        layers=(1,), limit=2, workers=1,
    )  # fmt: skip


def _load(name: str) -> LayerEncoder:
    return LayerEncoder(name, -1, device="cpu")


def _scores(setting: Setting) -> pl.DataFrame:
    return setting.sweep(setting.models[0]).filter(kind="score")


def outcome(setting: Setting, name: str = "fig6") -> tuple[str, str]:
    (first,) = reproduce([name], setting)
    if first.reason:
        return first.status, first.reason
    return first.status, str(pl.read_parquet(setting.out / f"{name}.parquet")["value"].to_list())


def rewritten(path: Path, content: bytes) -> None:
    """Write other content of the same size and modification time, as a copy that preserves times does."""
    status = path.stat()
    assert len(content) == status.st_size
    path.unlink()  # the weights of a loaded model are mapped and must not change in place
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.long
def test_changed_weights_and_tasks_are_measured_again(setting: Setting) -> None:
    first = outcome(setting)
    assert (first[0], outcome(setting)) == ("done", ("kept", first[1]))
    weights = Path(setting.models[0], "model.safetensors")
    tiny("Llama", 5).save_pretrained(weights.parent.parent / "other")  # type: ignore[operator]
    rewritten(weights, (weights.parent.parent / "other" / "model.safetensors").read_bytes())
    trained = outcome(setting)  # the same setting, which already loaded the model
    assert trained[0] == "done"
    assert trained[1] != first[1]
    task = Path(setting.tasks)
    rewritten(task, task.read_text().replace(" 5.0}", " 0.0}").encode())
    assert outcome(setting)[0] == "done"
    assert outcome(setting)[1] != trained[1]
    assert outcome(setting)[0] == "kept"


def test_files_that_change_during_a_run_are_not_cached_under_their_new_content(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changes(inputs: Setting) -> pl.DataFrame:
        frame = _scores(inputs)
        with Path(inputs.tasks).open("a") as file:
            file.write("\n")
        return frame

    monkeypatch.setitem(EXPERIMENTS, "fig7", replace(EXPERIMENTS["fig7"], run=changes))
    assert outcome(setting, "fig7") == (
        "failed",
        "The files of the model or of the tasks changed while it ran: run it again.",
    )
    assert not (setting.out / "fig7.parquet").exists()


def test_sweep_with_failed_tasks_is_repeated_and_not_reused(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("midlayer_encoders.sweeping.mteb_jobs.StoredLayer.encode", lambda *_, **__: 1 / 0)
        with pytest.raises(MidlayerError, match="Some tasks failed"), folder_lock(setting.out):
            setting.sweep(setting.models[0])
        assert outcome(setting)[0] == "failed"
        assert outcome(setting)[0] == "failed"
        (notes,) = setting.out.rglob("sweep.json")
        assert json.loads(notes.read_text())["failures"]
        swept = CliRunner().invoke(app, ["fig1", "--swept", str(notes.with_name("frame.parquet"))])
        assert isinstance(swept.exception, OptionError)
        assert "without failed tasks, but" in str(swept.exception)
    assert outcome(setting)[0] == "done"


def test_torn_files_are_created_again_and_only_one_run_writes(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    first = outcome(setting)
    (notes,) = setting.out.rglob("sweep.json")
    for torn in (
        [setting.out / "fig6.parquet"],
        [setting.out / "fig6.parquet", notes, notes.with_name("frame.parquet")],
    ):
        caplog.clear()
        for path in torn:
            path.write_bytes(path.read_bytes()[:20])
        assert outcome(setting) == ("done", first[1])
        assert all(f"{path} could not be read" in caplog.text for path in torn)
        assert outcome(setting)[0] == "kept"
    with folder_lock(setting.out), pytest.raises(FolderError, match="is in use"):
        reproduce(["fig7"], setting)
    (setting.out / "metrics").symlink_to(setting.out.parent)
    with pytest.raises(OptionError, match="must not contain links that lead out of it"):
        reproduce(["fig7"], setting)
    torn = setting.out / "torn.parquet"
    torn.write_bytes(b"PAR1")
    swept = CliRunner().invoke(app, ["fig1", "--swept", str(torn)])
    assert "cannot be read" in str(swept.exception)
