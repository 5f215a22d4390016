"""Two gloo processes that train together log the same values as one process."""

import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import polars
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback
from tests.callbacks.training import ADVICE, INPUTS, TOKENIZER, Boring, neox

pytestmark = ADVICE

LABELS = [0, 1] * 6
TEXTS = [f"{'good' if label else 'bad'} text {number}" for number, label in enumerate(LABELS)]


class Same(Boring):
    """Every process gets the same rows, so two processes take the same steps as one."""

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.run_backbone(input_ids=batch, labels=batch).loss


def train(processes: int, folder: Path) -> None:
    pl.seed_everything(0, verbose=False)
    rows = torch.randint(4, 90, (4, 12)).repeat(8, 1)
    common = {"token_budget": 64, "strict": True, "figures": False}
    callback = LayerMetricsCallback(INPUTS, TOKENIZER, every_n_steps=2, dirpath=folder / "metrics", **common)
    unlabelled = LastLayerDecline(
        TEXTS, TOKENIZER, every_n_steps=2, name="other", dirpath=folder / "unlabelled", **common
    )
    watch = LastLayerDecline(TEXTS, TOKENIZER, labels=LABELS, every_n_steps=2, dirpath=folder / "watch", **common)
    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", devices=processes, strategy="ddp_fork" if processes > 1 else "auto",
        logger=False, callbacks=[callback, unlabelled, watch], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Same(neox(dropout=0.0)), DataLoader(rows, 4))


@pytest.mark.slow
def test_two_processes_log_the_same_values_as_one(tmp_path: Path) -> None:
    # In a separate process, so that earlier tests have no effect.
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.callbacks.test_ddp", str(tmp_path)],
        capture_output=True, text=True, timeout=300, cwd=root, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    for name in ("metrics", "unlabelled", "watch"):
        single, double = (polars.read_parquet(tmp_path / count / name / "history.parquet") for count in "12")
        assert single.drop("value").equals(double.drop("value"))
        torch.testing.assert_close(torch.tensor(single["value"]), torch.tensor(double["value"]), rtol=1e-6, atol=1e-7)
    assert set(single["name"]) == {"prompt_entropy", "label_accuracy"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for count in (2, 1):  # in this order: a process that trained cannot fork
        train(count, Path(sys.argv[1]) / str(count))
