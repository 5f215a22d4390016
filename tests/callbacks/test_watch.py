"""LastLayerDecline in runs whose layers improve and decline by a script: when it warns, and that it acts once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from midlayer_encoders.callbacks import LastLayerDecline
from tests.callbacks.training import ADVICE, Boring, fit

pytestmark = ADVICE

ROWS = 20


def make_inputs() -> tuple[Tensor, list[int]]:
    """Return rows of 4 tokens whose first value is the class and whose second is the share of rows before it."""
    labels = [index % 2 for index in range(ROWS)]
    rows = torch.randn(ROWS, 4, 8, generator=torch.Generator().manual_seed(0))
    rows -= rows.mean(dim=1, keepdim=True)  # no noise in the mean over tokens
    rows[:, :, 0] = torch.tensor(labels)[:, None] * 2.0 - 1.0
    rows[:, :, 1] = torch.arange(ROWS)[:, None] / ROWS
    return rows, labels


class Block(nn.Module):
    """Classifies all rows correctly except the first few, for which it returns the other class."""

    def __init__(self, scripted: Scripted) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.wrong, self.flat = 0.0, False
        self.raw = lambda: scripted.raw

    def forward(self, _: Tensor) -> Tensor:
        values = self.raw().clone()
        values[..., 0] *= torch.where(values[..., 1] < self.wrong, -1.0, 1.0)
        values[..., 1] = 0.0
        if self.flat:
            values[..., 1:] = 0.0
        return values * self.scale


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.zeros(())
        self.steps = nn.ModuleList(Block(self) for _ in range(2))

    def forward(self, values: Tensor) -> Tensor:
        self.raw = values
        for block in self.steps:
            values = block(values)
        return values


class Script(pl.Callback):
    """Sets the misclassified rows of each layer after each step; the last line applies from there on."""

    def __init__(self, *lines: tuple[int, int], flat: int = 99) -> None:
        self.lines, self.flat = lines, flat

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        wrong = self.lines[min(trainer.global_step, len(self.lines) - 1)]
        for block, rows in zip(pl_module.backbone.steps, wrong, strict=True):
            block.wrong, block.flat = (rows - 0.5) / ROWS, trainer.global_step >= self.flat

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)


def run_script(folder: Path, script: Script, **options: Any) -> tuple[LastLayerDecline, int]:
    rows, labels = make_inputs()
    common = {"module": "backbone", "blocks": "steps", "layers": [1, 2], "every_n_steps": 1, "figures": False}
    watch = LastLayerDecline([rows], labels=labels, strict=True, dirpath=folder, **{**common, **options})
    batches = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(1))
    trace, _ = fit(Boring(Scripted()), folder, [script, watch], rows=batches, max_steps=6, logger=False)
    return watch, trace.step


FALLS = Script((6, 0), (6, 0), (0, 6))  # at step 2 the last layer falls to 0.7 and the first rises to 1


def test_script_controls_the_measured_accuracy(tmp_path: Path) -> None:
    watch, _ = run_script(tmp_path, FALLS)
    rows = watch.frame.filter(name="label_accuracy").select("revision", "layer", "value").rows()
    expected = [(f"step{s}", k, v) for s in range(7) for k, v in zip((1, 2), (0.7, 1.0) if s < 2 else (1.0, 0.7))]  # noqa: B905
    assert rows == [(step, layer, pytest.approx(value)) for step, layer, value in expected]


@pytest.mark.parametrize(
    ("script", "options", "step"),
    [
        (FALLS, {"patience": 1}, 2),
        (FALLS, {"patience": 2}, 3),
        (FALLS, {}, 3),
        (FALLS, {"patience": 3}, 4),
        (FALLS, {"patience": 1, "tolerance": 0.29}, 2),
        (FALLS, {"patience": 1, "tolerance": 0.31}, None),
        (FALLS, {"patience": 1, "every_n_steps": 4}, 4),
        (Script((4, 0), (0, 4)), {"patience": 1}, None),  # a fall of 0.2 is within 1 / sqrt(20)
        (Script((4, 0), (0, 4)), {"patience": 1, "tolerance": 0.1}, 1),
        (Script((4, 0), (0, 4)), {"patience": 1, "tolerance": 0}, 1),
        (Script((6, 0), (0, 6), (6, 0)), {"patience": 2}, None),  # it recovers
        (Script((0, 0), (0, 6)), {"patience": 1}, None),  # no other rises
        (Script((0, 6), (6, 0)), {"patience": 1}, None),  # the reverse
        (FALLS, {"patience": 1, "layers": [2]}, None),  # nothing earlier is measured
    ],
)
def test_decline_is_warned_of_at_its_step(
    script: Script, options: dict[str, Any], step: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "midlayer_encoders"):
        watch, _ = run_script(tmp_path, script, **options)
    messages = [record.getMessage() for record in caplog.records if record.name == "midlayer_encoders"]
    assert len(messages) == len(watch.events) == (step is not None)
    if step is not None:
        assert messages[0] == f"Step {step}: {watch.events[0]}."
        assert f"the last layer (2) fell from a label_accuracy of 1.000 at step 0 to {1 - script.lines[-1][1] / ROWS:.3f} at step {step}" in messages[0]  # fmt: skip
        assert "while layer 1 rose from" in messages[0]


def test_run_is_stopped_or_saved_once_per_event(tmp_path: Path) -> None:
    _, step = run_script(tmp_path / "a", FALLS, on_decline="stop", patience=1)
    assert step == 2
    script = Script((6, 0), (6, 0), (0, 6), flat=4)
    for action, saved in (("warn", []), ("checkpoint", ["decline-step2.ckpt", "decline-step4.ckpt"])):
        watch, step = run_script(tmp_path / action, script, on_decline=action, patience=1)
        assert step == 6
        assert [event.split(" ")[1] for event in watch.events] == ["last", "entropy"]
        assert sorted(path.name for path in (tmp_path / action).glob("*.ckpt")) == saved
    checkpoint = torch.load(tmp_path / "checkpoint" / "decline-step2.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2


@pytest.mark.parametrize(("share", "collapses"), [(0.2, True), (0.0, False)])
def test_collapse_is_a_share_of_the_highest_entropy(share: float, collapses: bool, tmp_path: Path) -> None:
    watch, _ = run_script(tmp_path, Script((0, 0), flat=2), collapse_share=share)
    entropies = watch.frame.filter(name="prompt_entropy", layer=1)["value"].to_list()
    assert min(entropies[:2]) > 0.01
    assert max(entropies[2:]) < 1e-6
    assert len(watch.events) == collapses
