"""A measurement leaves everything it could touch in a model and a process unchanged after each step."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from midlayer_encoders.callbacks import LastLayerDecline, LayerMetricsCallback, LayerMetricsTrainerCallback
from tests.callbacks.oracles import TEXTS
from tests.callbacks.test_trainer import make_trainer
from tests.callbacks.training import ADVICE, TOKENIZER, Boring, Stack, fit, generators, neox

pytestmark = ADVICE


def record_state(model: nn.Module) -> dict[str, Any]:
    """Return copies of everything that a forward pass could change."""
    parameters = list(model.named_parameters())
    return {
        "weights": {name: value.detach().clone() for name, value in parameters},
        "gradients": {name: None if value.grad is None else value.grad.clone() for name, value in parameters},
        "requires_grad": {name: value.requires_grad for name, value in parameters},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "generators": generators(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    assert type(actual) is type(expected), path
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in actual.items():
            assert_equal(value, expected[key], f"{path}/{key}")
    elif isinstance(actual, Tensor):
        assert torch.equal(actual, expected), path
    else:
        assert actual == expected, path


class Drawing(Stack):
    """Draws from every generator and updates buffers, even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.zeros(4), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        self.table = torch.full((len(values),), random.random() + np.random.rand())  # replaced, as rotary tables are
        return super().forward(values) + 0 * torch.rand(())


class Kept(Boring):
    """Records the state after each batch, after the callbacks ran."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self.states: list[dict[str, Any]] = []

    def on_train_start(self) -> None:
        self.backbone.requires_grad_(True)
        for name, value in self.backbone.named_parameters():
            value.requires_grad_("1" not in name)
        self.states.append(record_state(self))

    def on_train_batch_end(self, *_: Any) -> None:
        self.states.append(record_state(self))


def make_callbacks(kind: str, *, strict: bool = True) -> list[Any]:
    common: dict[str, Any] = {"every_n_steps": 1, "figures": False, "strict": strict}
    if kind == "plain":
        rows = torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(3)) + 1
        views = [[rows[:7]], [rows[7:14]]]
        options = {"module": "backbone", "blocks": "steps", "metrics": ["curvature", "infonce"], "views": views}
        return [LayerMetricsCallback([rows[:7]], **options, **common)]
    watch = LastLayerDecline(TEXTS, TOKENIZER, labels=[0, 1] * 6, **common)
    return [LayerMetricsCallback(TEXTS, TOKENIZER, metrics="paper", **common), watch]


@pytest.mark.parametrize(("kind", "accumulated"), [("plain", 2), ("GPTNeoX", 1)])
def test_lightning_run_is_unchanged_at_every_step(kind: str, accumulated: int, tmp_path: Path) -> None:
    runs = []
    for callbacks in ([], make_callbacks(kind)):
        module = Kept(Drawing() if kind == "plain" else neox())
        rows = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(0)) if kind == "plain" else None
        fit(module, tmp_path, callbacks, rows=rows, max_steps=3, accumulate_grad_batches=accumulated)
        runs.append(module)
    assert runs[0].losses == runs[1].losses
    assert len(runs[0].states) == 1 + 3 * accumulated
    for step, (expected, actual) in enumerate(zip(runs[0].states, runs[1].states, strict=True)):
        assert_equal(expected, actual, f"batch {step}")
    assert any(value is not None for value in runs[0].states[1]["gradients"].values())


class States(TrainerCallback):
    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states.append(record_state(kwargs["model"]))

    on_step_end = on_train_end = on_train_begin


def test_trainer_run_is_unchanged_at_every_step(tmp_path: Path) -> None:
    runs = []
    for callback_class in (None, LayerMetricsTrainerCallback):
        recorder = States()
        callbacks = (
            []
            if callback_class is None
            else [callback_class(TEXTS, metrics="paper", every_n_steps=1, figures=False, strict=True)]
        )
        hf_trainer = make_trainer(tmp_path, [*callbacks, recorder], max_steps=3)
        hf_trainer.train()
        losses = [entry["loss"] for entry in hf_trainer.state.log_history if "loss" in entry]
        runs.append((losses, recorder.states))
    assert runs[0][0] == runs[1][0]
    for step, (expected, actual) in enumerate(zip(runs[0][1], runs[1][1], strict=True)):
        assert_equal(expected, actual, f"step {step}")


def test_failed_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    class Fails(Drawing):
        def forward(self, values: Tensor) -> Tensor:
            output = super().forward(values)
            if not self.training:
                raise RuntimeError("out of memory")
            return output

    runs = []
    for callbacks in ([], make_callbacks("plain", strict=False)):
        module = Kept(Fails())
        rows = torch.randn(32, 4, 8, generator=torch.Generator().manual_seed(0))
        fit(module, tmp_path, callbacks, rows=rows, max_steps=2)
        runs.append(module.states)
    for expected, actual in zip(*runs, strict=True):
        assert_equal(expected, actual)
