"""A run that was stopped anywhere is, when it is called again, the run that was not stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.tuning import run
from tests.tiny_folders import TEXTS
from tests.tuning.rows import tuned

Folder = Callable[[str], str]
IDLE = {"epochs": 6, "learning_rate": 0.0, "patience": 3, "checkpoints": 12}  # stops early, after 12 steps


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "options", [IDLE, {"max_steps": 4, "checkpoints": 2, "held_out": 0}], ids=["early", "in an epoch"]
)
@pytest.mark.parametrize("stopped", [10, "before it is saved", "after it is saved"])
def test_the_run_ends_where_it_would_have(
    stopped: Any, options: dict[str, Any], tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("Llama")
    through = tuned(folder, tmp_path / "through", **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stopped == "before it is saved":
            patch.setattr(LayerEncoder, "save_pretrained", stop)
        elif stopped == "after it is saved":
            patch.setattr(run, "write_frame", stop)
        at = min(stopped, 3 * through.trained.steps // 4) if isinstance(stopped, int) else -1
        tuned(folder, tmp_path / "out", progress=lambda _, done, __: stop() if done == at else None, **options)
    resumed = tuned(folder, tmp_path / "out", **options)
    assert (resumed.trained.steps, resumed.trained.best_step) == (through.trained.steps, through.trained.best_step)
    assert resumed.trained.losses.equals(through.trained.losses)
    assert resumed.trained.metrics.equals(through.trained.metrics)
    np.testing.assert_array_equal(resumed.encoder.encode(TEXTS), through.encoder.encode(TEXTS))
