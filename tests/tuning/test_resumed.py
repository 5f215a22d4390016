"""A run that is stopped anywhere and repeated gives the result of an uninterrupted run."""

import shutil
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.settings import TrainingSettings
from midlayer_encoders.extras.training import fitting, runs
from midlayer_encoders.tasks.training_rows import TrainingRows
from tests.support.tiny_folders import TEXTS, Folder
from tests.tuning.rows import tuned

IDLE = {"epochs": 6, "learning_rate": 0.0, "patience": 2, "checkpoints": 12}  # stops early, after 9 steps
WITHIN = {"max_steps": 4, "checkpoints": 2, "held_out": 0}  # ends within an epoch


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def train_and_stop(*args: Any) -> None:
    fitting.train(*args)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stopped", "options"),
    [
        ("in training", IDLE),
        pytest.param("before it is saved", IDLE, marks=pytest.mark.slow),
        pytest.param("before it is saved", WITHIN, marks=pytest.mark.slow),
        pytest.param("after it is saved", WITHIN, marks=pytest.mark.slow),
        pytest.param("at its end", WITHIN, marks=pytest.mark.slow),
    ],
)
def test_resumed_run_gives_the_same_result(
    stopped: str, options: dict[str, Any], tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remove = tiny_folder("Llama"), shutil.rmtree
    through = tuned(folder, tmp_path / "through", **options)

    def killed(path: Any, **settings: Any) -> None:
        (stop if Path(path).name == "checkpoints" else remove)(path, **settings)

    def report(_: str, process: int, __: int) -> None:
        if process == through.trained.steps - 1 and stopped == "in training":
            stop()

    with monkeypatch.context() as patch:
        if stopped == "before it is saved":
            patch.setattr(runs, "train", train_and_stop)
        elif stopped == "after it is saved":
            patch.setattr(sys.modules["midlayer_encoders.extras.training.runs"], "write_frame", stop)
        elif stopped == "at its end":
            patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            tuned(folder, tmp_path / "out", progress=report, **options)
    resumed = tuned(folder, tmp_path / "out", **options)
    assert not (resumed.folder / "checkpoints").exists()
    assert (resumed.trained.steps, resumed.trained.best_step) == (through.trained.steps, through.trained.best_step)
    assert resumed.trained.losses.equals(through.trained.losses)
    assert resumed.trained.metrics.equals(through.trained.metrics)
    np.testing.assert_array_equal(resumed.encoder.encode(TEXTS), through.encoder.encode(TEXTS))


def test_run_with_any_other_identity_is_refused_and_the_difference_is_named(tmp_path: Path) -> None:
    encoder: Any = SimpleNamespace(spec=SimpleNamespace(digest="a"))
    rows = TrainingRows("pairs", ({"anchor": "a", "positive": "b"},), "file")
    run = runs.Run(encoder, rows, TrainingSettings(), tmp_path / "out", None, None)
    with run.claim(teacher="one"):
        pass
    identity = {**run.identity, "teacher": "one"}
    assert {"rows", "encoder", *(field.name for field in fields(TrainingSettings))} <= identity.keys()
    runs._claim_folder(run.folder, identity)
    for name in identity:
        with pytest.raises(OptionError, match=rf"had other values of: {name}\. Choose another"):
            runs._claim_folder(run.folder, {**identity, name: "another"})
