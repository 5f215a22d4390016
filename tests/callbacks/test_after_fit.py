"""What comes after training, or instead of it, leaves the history of the run as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import polars
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LayerMetricsCallback
from tests.callbacks.oracles import TEXTS
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, fit, neox

pytestmark = ADVICE


class Judged(Boring):
    def test_step(self, batch: torch.Tensor) -> None:
        self.log("test", batch.float().mean())


def callback(folder: Path, **options: Any) -> LayerMetricsCallback:
    common = {"metrics": ["curvature", "dataset_entropy"], "every_n_steps": 2, "figures": False, "strict": True}
    return LayerMetricsCallback(TEXTS, TOKENIZER, dirpath=folder, **{**common, **options})


@pytest.mark.parametrize("what", ["validate", "test"])
@pytest.mark.parametrize("weights", [None, "a checkpoint"])
def test_a_validation_or_test_after_training_keeps_the_history(what: str, weights: str | None, tmp_path: Path) -> None:
    seen = callback(tmp_path)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    module = Judged(neox())
    _, trainer = fit(module, tmp_path, [seen, saver], max_steps=5, enable_checkpointing=True, logger=False)
    before = seen.frame
    assert before["revision"].unique(maintain_order=True).to_list() == ["step0", "step2", "step4", "step5"]
    path = None if weights is None else str(tmp_path / "step=2.ckpt")
    getattr(trainer, what)(module, DataLoader(torch.ones(4, 4), 4), ckpt_path=path, verbose=False)
    assert seen.frame.equals(before)
    assert polars.read_parquet(tmp_path / "history.parquet").equals(before)


def test_a_validation_of_a_checkpoint_is_of_the_step_of_its_weights(tmp_path: Path) -> None:
    seen = callback(tmp_path / "a")
    _, trainer = fit(Judged(neox()), tmp_path, [seen], max_steps=3, logger=False)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    alone = callback(tmp_path / "b")
    logger = CSVLogger(tmp_path / "b", version="")
    fresh = pl.Trainer(accelerator="cpu", logger=logger, callbacks=[alone], enable_progress_bar=False)
    fresh.validate(Judged(neox(seed=8)), DataLoader(torch.ones(4, 4), 4), str(tmp_path / "run.ckpt"), verbose=False)
    logged = polars.read_csv(Path(logger.log_dir) / "metrics.csv")
    assert set(logged.filter(polars.col("midlayer/curvature/layer_01").is_not_null())["step"]) == {3}
    assert alone.frame.equals(seen.frame)  # steps 0, 2 and, of the weights that were loaded, 3
    assert polars.read_parquet(tmp_path / "b" / "history.parquet").equals(seen.frame)
