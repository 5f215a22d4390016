"""What comes after training, or instead of it, leaves the history of the run as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback
from tests.callbacks.oracles import TEXTS
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox
from tests.families import VOCAB

pytestmark = ADVICE


class Judged(Boring):
    def test_step(self, batch: torch.Tensor) -> None:
        self.log("test", batch.float().mean())

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


def callback(folder: Path, **options: Any) -> LayerMetricsCallback:
    common = {"metrics": ["curvature", "dataset_entropy"], "every_n_steps": 2, "figures": False, "strict": True}
    return LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=folder, **{**common, **options})


def steps_of(seen: LayerMetricsCallback) -> list[str]:
    return seen.frame["revision"].unique(maintain_order=True).to_list()


def other_trainer(seen: LayerMetricsCallback, logger: Any = False) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=logger, callbacks=[seen], enable_progress_bar=False, enable_model_summary=False
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[LayerMetricsCallback, Judged, pl.Trainer, Path]:
    """Return a run of 5 steps that has a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run")
    seen, module = callback(folder), Judged(neox())
    saver = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    _, trainer = fit(module, folder, [seen, saver], max_steps=5, enable_checkpointing=True, logger=False)
    return seen, module, trainer, folder


@pytest.mark.parametrize("trainer", ["the same", "another"])
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.parametrize("weights", [None, "step=2.ckpt", "step=3.ckpt"])  # one that was measured, one that was not
def test_what_follows_training_keeps_the_history(finished: Any, trainer: str, what: str, weights: str | None) -> None:
    seen, module, made, folder = finished
    before = seen.frame
    assert steps_of(seen) == ["step0", "step2", "step4", "step5"]
    after = made if trainer == "the same" else other_trainer(seen)
    quiet = {} if what == "predict" else {"verbose": False}
    path = None if weights is None else str(folder / weights)
    getattr(after, what)(module, DataLoader(torch.ones(4, 4), 4), ckpt_path=path, **quiet)
    assert seen.frame.equals(before)
    assert polars.read_parquet(folder / "history.parquet").equals(before)


def test_a_trainer_that_goes_on_keeps_the_history(tmp_path: Path) -> None:
    rows = DataLoader(torch.randint(4, VOCAB, (8, 12), generator=torch.Generator().manual_seed(0)), 4)
    seen, module = callback(tmp_path), Boring(neox())
    _, trainer = fit(module, tmp_path, [seen], max_steps=3, logger=False)
    before = seen.frame
    trainer.fit(module, rows)  # it has reached `max_steps`: nothing is trained
    assert seen.frame.equals(before)
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, rows)
    assert steps_of(seen) == ["step0", "step2", "step3", "step4", "step5"]
    assert seen.frame.head(len(before)).equals(before)
    assert polars.read_parquet(tmp_path / "history.parquet").equals(seen.frame)


class Shell(nn.Module):
    """A transformer at another place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = neox()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_trainer_that_goes_on_with_another_kind_of_module_begins_anew(tmp_path: Path) -> None:
    seen = callback(tmp_path)
    _, trainer = fit(Boring(neox()), tmp_path, [seen], max_steps=2, logger=False)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(Boring(Shell()), DataLoader(torch.randint(4, VOCAB, (8, 12)), 4))
    assert steps_of(seen) == ["step2", "step4"]


def test_a_validation_of_a_checkpoint_is_of_the_step_of_its_weights(tmp_path: Path) -> None:
    seen = callback(tmp_path / "a")
    _, trainer = fit(Judged(neox()), tmp_path, [seen], max_steps=3, logger=False)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    alone = callback(tmp_path / "b")
    logger = CSVLogger(tmp_path / "b", version="")
    fresh, rows = other_trainer(alone, logger=logger), DataLoader(torch.ones(4, 4), 4)
    fresh.validate(Judged(neox(seed=8)), rows, str(tmp_path / "run.ckpt"), verbose=False)
    logged = polars.read_csv(Path(logger.log_dir) / "metrics.csv")
    assert set(logged.filter(polars.col("midlayer/curvature/layer_01").is_not_null())["step"]) == {3}
    assert alone.frame.equals(seen.frame)  # steps 0, 2 and, of the weights that were loaded, 3
    assert polars.read_parquet(tmp_path / "b" / "history.parquet").equals(seen.frame)
    fresh.validate(Judged(neox(seed=8)), rows, verbose=False)
    assert steps_of(alone) == ["step0"]  # another validation alone, of other weights


@pytest.mark.parametrize("what", ["fit", "validate"])
def test_fast_dev_run_measures_and_writes_nothing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    common: dict[str, Any] = {"every_n_steps": 1, "strict": True}
    seen = LayerMetricsCallback(TEXTS, TOKENIZER, metrics=["curvature"], **common)
    # Every entropy is below its highest so far, so that there is something to save.
    watch = LastLayerDecline(TEXTS, TOKENIZER, on_decline="checkpoint", collapse_share=0.999, dirpath="runs", **common)
    trainer = pl.Trainer(
        accelerator="cpu", callbacks=[seen, watch], fast_dev_run=3, enable_progress_bar=False, enable_model_summary=False
    )  # fmt: skip
    rows = DataLoader(torch.randint(4, VOCAB, (12, 12)), 4)
    (trainer.fit if what == "fit" else trainer.validate)(Boring(neox(dropout=0.0)), rows)
    assert steps_of(seen) == (["step0", "step1", "step2", "step3"] if what == "fit" else ["step0"])
    assert bool(watch.events) == (what == "fit")
    assert list(tmp_path.rglob("*")) == []
