"""A run never continues from a damaged file."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError
from midlayer_encoders.extras.training import TuneResult, fitting, runs
from midlayer_encoders.extras.training.fitting import _last_checkpoint
from midlayer_encoders.extras.training.trainer_internals import CHECKSUMS
from midlayer_encoders.files import LOCK, dump_with_checksum, file_checksums
from tests.support.tiny_folders import TEXTS, Folder
from tests.tuning.rows import tuned

OPTIONS: dict[str, Any] = {"max_steps": 4, "checkpoints": 4, "held_out": 0}


@pytest.fixture(autouse=True)
def without_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the page, which takes longer than the run."""
    monkeypatch.setattr(TuneResult, "save", lambda _: None)


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x02
    path.write_bytes(content)


@pytest.mark.long
def test_complete_run_is_not_loaded_from_a_damaged_file(tiny_folder: Folder, tmp_path: Path) -> None:
    vectors = tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS).encoder.encode(TEXTS)
    for name in ("model/model.safetensors", "model/config.json", "metrics.parquet"):
        path = tmp_path / "out" / name
        content = path.read_bytes()
        flip(path)
        with pytest.raises(
            MidlayerError, match=rf"{path.name} does not match its checksum: remove .*trained\.json, and"
        ):
            tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS)
        path.write_bytes(content)
    (tmp_path / "out" / "model" / "README.md").write_text("my own card")
    np.testing.assert_array_equal(
        tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS).encoder.encode(TEXTS), vectors
    )
    record = tmp_path / "out" / "trained.json"
    record.write_bytes(record.read_bytes().replace(b'"steps": 4', b'"steps": 5'))
    assert tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS).trained.steps == 4  # trained again


@pytest.mark.long
def test_interrupted_run_is_not_resumed_from_a_damaged_checkpoint(tiny_folder: Folder, tmp_path: Path) -> None:
    def stop(_: str, step: int, __: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tiny_folder("Llama"), tmp_path / "out", progress=stop, **OPTIONS)
    checkpoints = tmp_path / "out" / "checkpoints"
    for name in ("trained.safetensors", "optimizer.pt", "trainer_state.json"):
        for path in checkpoints.glob(f"*/{name}"):
            content = path.read_bytes()
            flip(path)
            with pytest.raises(
                MidlayerError, match=rf"{path.name} does not match its checksum: remove .*checkpoints, and"
            ):
                tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS)
            path.write_bytes(content)
    flip(max(checkpoints.glob("*/checksums.json")))  # this checkpoint counts as incomplete
    resumed = tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS)
    through = tuned(tiny_folder("Llama"), tmp_path / "through", **OPTIONS)
    np.testing.assert_array_equal(resumed.encoder.encode(TEXTS), through.encoder.encode(TEXTS))


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def train_and_stop(*args: Any) -> None:
    fitting.train(*args)
    raise KeyboardInterrupt


def test_unreadable_settings_do_not_admit_another_run(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS, progress=stop)
    for content in ("", '{"seed": 0', "null"):
        (tmp_path / "out" / "tuning.json").write_text(content)
        with pytest.raises(MidlayerError, match=r"tuning\.json cannot be read \(.*\): remove .*out, or choose another"):
            tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS, seed=1)


def test_run_that_was_killed_at_its_first_write_starts_again(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    (tmp_path / f".{'a' * 32}.tmp").write_text("{")
    with pytest.raises(KeyboardInterrupt):
        tuned(tiny_folder("Llama"), tmp_path, **OPTIONS, progress=stop)


def test_file_in_place_of_the_checkpoints_is_named(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tuned(tiny_folder("Llama"), tmp_path, **OPTIONS, progress=stop)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(FolderError, match=r"checkpoints cannot be written \(File exists\) because of .*checkpoints:"):
        tuned(tiny_folder("Llama"), tmp_path, **OPTIONS)


IDLE: dict[str, Any] = {"max_steps": 4, "checkpoints": 4, "learning_rate": 0.0}  # the first step stays the best


@pytest.mark.long
def test_run_does_not_continue_without_its_best_checkpoint(tiny_folder: Folder, tmp_path: Path) -> None:
    def stop_at_end(_: str, step: int, __: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(tiny_folder("Llama"), tmp_path / "out", progress=stop_at_end, **IDLE)
    checkpoints = tmp_path / "out" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-1", "checkpoint-3"]
    flip(checkpoints / "checkpoint-1" / CHECKSUMS)
    steps: list[int] = []
    resumed = tuned(tiny_folder("Llama"), tmp_path / "out", progress=lambda _, step, __: steps.append(step), **IDLE)
    assert steps[:3] == [0, 0, 1]  # trained anew
    assert resumed.trained.best_step == 1


@pytest.mark.long
def test_moved_run_continues_with_its_own_checkpoints(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tuned(tiny_folder("Llama"), tmp_path / "through", **IDLE)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", train_and_stop)
        with pytest.raises(KeyboardInterrupt):
            tuned(tiny_folder("Llama"), tmp_path / "old", **IDLE)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    weights = tmp_path / "old" / "checkpoints" / "checkpoint-1" / "trained.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights)
    for place in ("new", "newer"):
        resumed = tuned(tiny_folder("Llama"), tmp_path / place, **IDLE)
        assert resumed.trained.best_step == 1
        np.testing.assert_array_equal(resumed.encoder.encode(TEXTS), expected.encoder.encode(TEXTS))
        if place == "new":
            (tmp_path / "old").rename(tmp_path / "newer")
            weights = tmp_path / "newer" / "checkpoints" / "checkpoint-1" / "trained.safetensors"
            save_file({name: tensor / 2 for name, tensor in load_file(weights).items()}, weights)


@pytest.mark.long
def test_resumed_run_has_the_same_config_and_identity(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer copies special tokens of the tokenizer to the config."""
    before = LayerEncoder(tiny_folder("Llama"), 2, device="cpu").spec
    through = tuned(tiny_folder("Llama"), tmp_path / "through", **IDLE)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "train", train_and_stop)
        with pytest.raises(KeyboardInterrupt):
            tuned(tiny_folder("Llama"), tmp_path / "out", **IDLE)
    resumed = tuned(tiny_folder("Llama"), tmp_path / "out", **IDLE)
    assert through.encoder.spec.digest == resumed.encoder.spec.digest
    assert through.encoder.spec.parts == before.parts
    for name in ("config.json", "model.safetensors"):
        assert (resumed.model_folder / name).read_bytes() == (through.model_folder / name).read_bytes()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torch leaves it open on a full disk
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_full_disk_is_named_and_the_run_continues(tiny_folder: Folder, small_disk: Path, tmp_path: Path) -> None:
    """A checkpoint takes 260 kB, of which torch writes 170 kB."""
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 130_000))
    with pytest.raises(DiskFullError, match=f"disk of {small_disk} is full"):
        tuned(tiny_folder("Llama"), small_disk / "out", **OPTIONS)
    shutil.copytree(small_disk / "out", tmp_path / "out")
    resumed = tuned(tiny_folder("Llama"), tmp_path / "out", **OPTIONS)
    through = tuned(tiny_folder("Llama"), tmp_path / "through", **OPTIONS)
    np.testing.assert_array_equal(resumed.encoder.encode(TEXTS), through.encoder.encode(TEXTS))


def test_last_checkpoint_has_the_most_steps(tmp_path: Path) -> None:
    for steps in (900, 1000):
        folder = tmp_path / f"checkpoint-{steps}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        (folder / CHECKSUMS).write_bytes(dump_with_checksum(file_checksums(folder)))
    assert _last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1000")
