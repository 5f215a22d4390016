"""What a progression keeps in its folder, and when it may be used again."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing import ProgressionResult, progression
from midlayer_encoders.encoder.sentence_transformers_encoder import measure
from tests.families import DEPTH
from tests.thinned import thinned
from tests.tiny_folders import TEXTS as MORE
from tests.tiny_folders import save_tiny

pytestmark = pytest.mark.usefixtures("quick_collector", "unsaved")

TEXTS = MORE[:4]
STEPS = {"step1": 1, "checkpoint-20": 20, "checkpoint-3": 3}  # by name 20 stands before 3
BEFORE: dict[str, Any] = {
    "texts": TEXTS, "metrics": ["dataset_entropy", "lidar"], "layers": "all", "norm": "none",
    "pooling": "mean", "views": 3, "seed": 0, "dataset": "mine", "dtype": None, "max_length": None,
    "revisions": ["step1", "checkpoint-3"],
}  # fmt: skip
CHANGES: dict[str, Any] = {
    "texts": [*TEXTS[:-1], "another one"], "metrics": ["lidar"], "layers": [0, -2], "norm": "final",
    "pooling": "last", "views": 2, "seed": 1, "dataset": "other", "dtype": "float16", "max_length": 9,
    "revisions": ["step1", "checkpoint-20"],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for name, step in STEPS.items():
        save_tiny("GPTNeoX", folder / name, seed=step)
    return folder


@pytest.fixture(scope="module")
def out(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with the settings of before, to be copied by each test."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgressionResult, "save", lambda self: self.folder)
        progress(run, out=folder)
    return folder


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figures, which take longer than all the rest: each step is kept all the same."""
    monkeypatch.setattr(ProgressionResult, "save", lambda self: self.folder)


def progress(run: Path, **options: Any) -> ProgressionResult:
    return progression(str(run), device="cpu", **(BEFORE | options))


@pytest.fixture(scope="module")
def before(run: Path) -> pl.DataFrame:
    return by_hand(run)


@cache
def encoder(folder: Path, **options: Any) -> LayerEncoder:
    return LayerEncoder(str(folder), -1, device="cpu", **options)


def by_hand(run: Path, **options: Any) -> pl.DataFrame:
    """Return what `measure` says of each checkpoint by itself, in the order of the steps."""
    how = BEFORE | options
    frames = []
    for name in sorted(how.pop("revisions"), key=STEPS.__getitem__):
        mine = {key: how[key] for key in ("norm", "pooling", "dtype", "max_length")}
        rest = {key: value for key, value in how.items() if key != "texts" and key not in mine}
        found = measure(encoder(run / name, **mine), how["texts"], **rest)
        frames.append(found.with_columns(model=pl.lit(f"local/{run.name}"), revision=pl.lit(f"step{STEPS[name]}")))
    return pl.concat(frames)


@pytest.mark.parametrize("changed", thinned(CHANGES, 4))
def test_what_was_kept_is_not_mixed_with_what_is_measured_another_way(
    changed: str, run: Path, out: Path, before: pl.DataFrame, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "out")
    other = {changed: CHANGES[changed]}
    found = progress(run, out=tmp_path / "out", **other).frame
    assert_frame_equal(found, by_hand(run, **other), rel_tol=1e-4)
    assert not found.equals(before), "or the change says nothing"
    told: list[int] = []
    again = progress(run, out=tmp_path / "out", progress=lambda _, done, __: told.append(done)).frame
    assert_frame_equal(again, before, rel_tol=1e-4)
    assert told == [4 * len(TEXTS), 8 * len(TEXTS)], (
        "the texts and three views of each step, at once: nothing is measured again"
    )


def test_a_copy_under_another_name_is_called_by_its_own(run: Path, out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    shutil.copytree(run, tmp_path / "twin")  # with the same times
    found = progress(tmp_path / "twin", out=tmp_path / "out").frame
    assert set(found["model"]) == {"local/twin"}


def test_killed_while_a_step_is_written_equals_never_stopped(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"revisions": list(STEPS)}
    write = Path.write_bytes
    written: list[Path] = []

    def torn(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 2:
            write(path, content[:100])
            raise KeyboardInterrupt
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", torn)
        with pytest.raises(KeyboardInterrupt):
            progress(run, out=tmp_path, **names)
    told: dict[str, list[int]] = {}
    names["progress"] = lambda name, done, _: told.setdefault(name, []).append(done)
    found = progress(run, out=tmp_path, **names)
    assert list(told) == ["step1", "checkpoint-3", "checkpoint-20"]
    assert told["step1"] == [4 * len(TEXTS)]
    assert len(told["checkpoint-3"]) > 1, "measured again"
    assert_frame_equal(found.frame, progress(run, **names).frame)


def test_a_step_that_failed_is_measured_once_it_can_be(run: Path, before: pl.DataFrame, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / run.name)
    weights = tmp_path / run.name / "checkpoint-3" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(b"torn")
    first = progress(tmp_path / run.name, out=tmp_path / "out")
    assert (list(first.failures), set(first.frame["revision"])) == (["checkpoint-3"], {"step1"})
    weights.write_bytes(good)
    second = progress(tmp_path / run.name, out=tmp_path / "out")
    assert not second.failures
    assert_frame_equal(second.frame, before, rel_tol=1e-4)


def test_what_is_said_of_the_run_is_how_it_was_measured(run: Path, out: Path) -> None:
    said = progress(run, out=out).how
    assert said["texts"].startswith(f"{len(TEXTS)} (mine, digest ")
    assert (said["norm"], said["pooling"], said["views"]) == ("none", "mean", "seed 0")
    assert not {"dtype", "max length"} & set(said), "what nobody chose"
    other = progress(run, metrics="curvature", norm="final", pooling="last", seed=7, dtype="float16", max_length=9)
    assert (other.how["norm"], other.how["pooling"], other.how["views"]) == ("final", "last", "seed 7")
    assert (other.how["dtype"], other.how["max length"]) == ("float16", "9")
    assert other.how["texts"] == said["texts"]


def test_changes_and_settled_steps_are_those_of_the_frame(run: Path) -> None:
    found = progress(run, metrics="dataset_entropy", revisions=list(STEPS))
    values = {(step, layer): value for step, layer, value in found.frame.select("revision", "layer", "value").rows()}
    span = max(values.values()) - min(values.values())
    for layer, previous, step, change, relative in found.changes().drop("dataset", "name").iter_rows():
        assert (previous, step) in ((1, 3), (3, 20))
        moved = abs(values[f"step{step}", layer] - values[f"step{previous}", layer])
        assert (change, relative) == (pytest.approx(moved), pytest.approx(moved / span))
    assert found.changes().height == 2 * (DEPTH + 1)
    for layer, step, final in found.settled(within=0.3).drop("dataset", "name").iter_rows():
        assert final == values["step20", layer]
        near = [abs(values[f"step{one}", layer] - final) <= 0.3 * span for one in (1, 3, 20)]
        assert step == next(one for place, one in enumerate((1, 3, 20)) if all(near[place:]))
