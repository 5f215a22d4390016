"""Files that a progression saves in its folder, and when they are reused."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing import ProgressionResult, progression
from midlayer_encoders.encoder.whole_model import measure
from tests.support.families import DEPTH
from tests.support.thinned import thinned
from tests.support.tiny_folders import TEXTS as MORE
from tests.support.tiny_folders import save_tiny

pytestmark = pytest.mark.usefixtures("unsaved")

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
    """Skip the figures, which take longer than everything else; each step is saved anyway."""
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
    settings = BEFORE | options
    frames = []
    for name in sorted(settings.pop("revisions"), key=STEPS.__getitem__):
        own_rows = {key: settings[key] for key in ("norm", "pooling", "dtype", "max_length")}
        rest = {key: value for key, value in settings.items() if key != "texts" and key not in own_rows}
        frame = measure(encoder(run / name, **own_rows), settings["texts"], **rest)
        frames.append(frame.with_columns(model=pl.lit(f"local/{run.name}"), revision=pl.lit(f"step{STEPS[name]}")))
    return pl.concat(frames)


@pytest.mark.parametrize("changed", thinned(CHANGES, 4))
def test_saved_steps_are_not_mixed_with_other_settings(
    changed: str, run: Path, out: Path, before: pl.DataFrame, tmp_path: Path
) -> None:
    shutil.copytree(out, tmp_path / "out")
    other_item = {changed: CHANGES[changed]}
    actual = progress(run, out=tmp_path / "out", **other_item).frame
    assert_frame_equal(actual, by_hand(run, **other_item), rel_tol=1e-4)
    assert not actual.equals(before), "or the change says nothing"
    reports: list[int] = []
    repeated = progress(run, out=tmp_path / "out", progress=lambda _, process, __: reports.append(process)).frame
    assert_frame_equal(repeated, before, rel_tol=1e-4)
    assert reports == [4 * len(TEXTS), 8 * len(TEXTS)], (
        "the texts and three views of each step, at once: nothing is measured again"
    )


def test_copy_under_another_name_keeps_its_own_name(run: Path, out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    shutil.copytree(run, tmp_path / "twin")  # with the same times
    actual = progress(tmp_path / "twin", out=tmp_path / "out").frame
    assert set(actual["model"]) == {"local/twin"}


@pytest.mark.long
def test_kill_while_writing_a_step_does_not_change_the_result(
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
    reports: dict[str, list[int]] = {}
    names["progress"] = lambda name, process, _: reports.setdefault(name, []).append(process)
    actual = progress(run, out=tmp_path, **names)
    assert list(reports) == ["step1", "checkpoint-3", "checkpoint-20"]
    assert reports["step1"] == [4 * len(TEXTS)]
    assert len(reports["checkpoint-3"]) > 1, "measured again"
    assert_frame_equal(actual.frame, progress(run, **names).frame)


@pytest.mark.long
def test_failed_step_is_measured_once_it_is_readable(run: Path, before: pl.DataFrame, tmp_path: Path) -> None:
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


@pytest.mark.long
def test_description_of_the_run_matches_its_settings(run: Path, out: Path) -> None:
    output = progress(run, out=out).how
    assert output["texts"].startswith(f"{len(TEXTS)} (mine, digest ")
    assert (output["norm"], output["pooling"], output["views"]) == ("none", "mean", "seed 0")
    assert not {"dtype", "max length"} & set(output), "what nobody chose"
    other_item = progress(run, metrics="curvature", norm="final", pooling="last", seed=7, dtype="float16", max_length=9)
    assert (other_item.how["norm"], other_item.how["pooling"], other_item.how["views"]) == ("final", "last", "seed 7")
    assert (other_item.how["dtype"], other_item.how["max length"]) == ("float16", "9")
    assert other_item.how["texts"] == output["texts"]


@pytest.mark.long
def test_changes_and_settled_steps_match_the_frame(run: Path) -> None:
    actual = progress(run, metrics="dataset_entropy", revisions=list(STEPS))
    values = {(step, layer): value for step, layer, value in actual.frame.select("revision", "layer", "value").rows()}
    span = max(values.values()) - min(values.values())
    for layer, previous, step, change, relative in actual.changes().drop("dataset", "name").iter_rows():
        assert (previous, step) in ((1, 3), (3, 20))
        transformed = abs(values[f"step{step}", layer] - values[f"step{previous}", layer])
        assert (change, relative) == (pytest.approx(transformed), pytest.approx(transformed / span))
    assert actual.changes().height == 2 * (DEPTH + 1)
    for layer, step, final in actual.settled(within=0.3).drop("dataset", "name").iter_rows():
        assert final == values["step20", layer]
        near = [abs(values[f"step{item}", layer] - final) <= 0.3 * span for item in (1, 3, 20)]
        assert step == next(item for place, item in enumerate((1, 3, 20)) if all(near[place:]))
