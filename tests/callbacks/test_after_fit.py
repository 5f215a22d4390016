"""Calls after training, or instead of it, keep the history of the run."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback
from tests.callbacks.oracles import TEXTS
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox
from tests.support.families import VOCAB

pytestmark = ADVICE


class Judged(Boring):
    def test_step(self, batch: torch.Tensor) -> None:
        self.log("test", batch.float().mean())

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


def make_callback(folder: Path, **options: Any) -> LayerMetricsCallback:
    common = {"metrics": ["curvature", "dataset_entropy"], "every_n_steps": 2, "figures": False, "strict": True}
    return LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=folder, **{**common, **options})


def measured_steps(callback: LayerMetricsCallback) -> list[str]:
    return callback.frame["revision"].unique(maintain_order=True).to_list()


def make_other_trainer(callback: LayerMetricsCallback, logger: Any = False) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=logger, callbacks=[callback], enable_progress_bar=False, enable_model_summary=False
    )


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerMetricsCallback, Judged, pl.Trainer, Path]:
    """Return a run of 5 steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run")
    callback, module = make_callback(folder), Judged(neox())
    saver = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    _, trainer = fit(module, folder, [callback, saver], max_steps=5, enable_checkpointing=True, logger=False)
    return callback, module, trainer, folder


@pytest.mark.parametrize("trainer", ["the same", "another"])
@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize("weights", [None, "step=2.ckpt", "step=3.ckpt"])  # a measured step and another one
def test_calls_after_training_keep_the_history(
    finished_run: Any, trainer: str, method: str, weights: str | None
) -> None:
    callback, module, same_trainer, folder = finished_run
    before = callback.frame
    assert measured_steps(callback) == ["step0", "step2", "step4", "step5"]
    used_trainer = same_trainer if trainer == "the same" else make_other_trainer(callback)
    verbosity = {} if method == "predict" else {"verbose": False}
    path = None if weights is None else str(folder / weights)
    getattr(used_trainer, method)(module, DataLoader(torch.ones(4, 4), 4), ckpt_path=path, **verbosity)
    assert callback.frame.equals(before)
    assert polars.read_parquet(folder / "history.parquet").equals(before)


def test_continued_training_keeps_the_history(tmp_path: Path) -> None:
    rows = DataLoader(torch.randint(4, VOCAB, (8, 12), generator=torch.Generator().manual_seed(0)), 4)
    callback, module = make_callback(tmp_path), Boring(neox())
    _, trainer = fit(module, tmp_path, [callback], max_steps=3, logger=False)
    before = callback.frame
    trainer.fit(module, rows)  # `max_steps` is reached: nothing is trained
    assert callback.frame.equals(before)
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, rows)
    assert measured_steps(callback) == ["step0", "step2", "step3", "step4", "step5"]
    assert callback.frame.head(len(before)).equals(before)
    assert polars.read_parquet(tmp_path / "history.parquet").equals(callback.frame)


class Shell(nn.Module):
    """A module whose transformer has another path."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = neox()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_continued_training_with_another_module_starts_a_new_history(tmp_path: Path) -> None:
    callback = make_callback(tmp_path)
    _, trainer = fit(Boring(neox()), tmp_path, [callback], max_steps=2, logger=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Boring(Shell()), DataLoader(torch.randint(4, VOCAB, (8, 12)), 4))
    assert measured_steps(callback) == ["step2", "step4"]


@pytest.mark.parametrize("method", ["fit", "validate"])
def test_fast_dev_run_measures_and_writes_nothing(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common: dict[str, Any] = {"every_n_steps": 1, "strict": True}
    callback = LayerMetricsCallback(TEXTS, TOKENIZER, metrics=["curvature"], **common)
    # Every entropy is below its highest value so far, so there is something to save.
    watch = LastLayerDecline(TEXTS, TOKENIZER, on_decline="checkpoint", collapse_share=0.999, dirpath="runs", **common)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[callback, watch], fast_dev_run=3, enable_progress_bar=False, enable_model_summary=False
    )  # fmt: skip
    rows = DataLoader(torch.randint(4, VOCAB, (12, 12)), 4)
    (trainer.fit if method == "fit" else trainer.validate)(Boring(neox(dropout=0.0)), rows)
    if method == "fit":
        assert measured_steps(callback) == ["step0", "step1", "step2", "step3"]
    assert bool(watch.events) == (method == "fit")
    assert list(tmp_path.rglob("*")) == []
