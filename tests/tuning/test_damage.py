"""A run never continues from a damaged file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.files import file_checksums, sealed
from midlayer_encoders.tuning import TuneResult
from midlayer_encoders.tuning.trainer_internals import CHECKSUMS
from midlayer_encoders.tuning.training import _last_checkpoint
from tests.tiny_folders import TEXTS
from tests.tuning.rows import tuned

Folder = Callable[[str], str]
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


def test_last_checkpoint_has_the_most_steps(tmp_path: Path) -> None:
    for steps in (900, 1000):
        folder = tmp_path / f"checkpoint-{steps}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        (folder / CHECKSUMS).write_bytes(sealed(file_checksums(folder)))
    assert _last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1000")
