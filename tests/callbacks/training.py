"""Small runs shared by the callback tests, and everything about a run that must not change."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from tests.support.families import VOCAB
from tests.support.tiny_folders import TEXTS, tokenizer

ADVICE = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "You defined a `validation_step` but have no `val_dataloader`",
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "Be aware that when using `ckpt_path`",
        "You're resuming from a checkpoint that ended before the epoch ended",
        "The '[a-z]+_dataloader' does not have many workers",  # on machines of more than two cores
        "GPU available but not used",
    )
]
"""Warnings of Lightning about small runs and its own use of torch."""

TOKENIZER = tokenizer()
INPUTS = [*TEXTS[:5], "a card pin can be reset at any machine", "the mat was on the cat", "markets rose again"]


def neox(dropout: float = 0.1, seed: int = 0) -> GPTNeoXForCausalLM:
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    return GPTNeoXForCausalLM(config)


class Stack(nn.Module):
    """A plain module with a list of blocks, a norm that learns from batches, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(3))
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, values: Tensor) -> Tensor:
        values = self.batch_norm(values)
        for step in self.steps:
            values = values + step(values)
        return values


class Boring(pl.LightningModule):
    """A run that records its losses and the order of its rows."""

    def __init__(self, backbone: nn.Module, *, compiled: bool = False) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.run_backbone: Any = torch.compile(backbone, backend="eager") if compiled else backbone
        self.losses: list[float] = []
        self.row_order: list[Any] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.row_order.append(batch.flatten()[:4].tolist())
        if batch.is_floating_point():
            loss = self.run_backbone(batch).pow(2).mean() + 0.01 * torch.rand(())
        else:
            loss = self.run_backbone(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, _: int) -> None:
        self.log("val", batch.float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.backbone.parameters(), lr=1e-2)


class Shapes(Boring):
    """Records the input shapes of every forward pass outside training."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone)
        self.shapes: list[torch.Size] = []

    def on_fit_start(self) -> None:
        self.backbone.register_forward_pre_hook(
            lambda module, _, kwargs: None if module.training else self.shapes.append(kwargs["input_ids"].shape),
            with_kwargs=True,
        )


@dataclass
class Trace:
    """Values that are bitwise equal in two equal runs."""

    losses: list[float]
    row_order: list[Any]
    weights: dict[str, Tensor]
    optimizer: Any
    step: int
    modes: list[bool]
    generators: tuple[Any, ...] = field(repr=False)


def generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def fit(
    module: Boring, folder: Path, callbacks: list[Any], *, rows: Tensor | None = None, ckpt: str | None = None,
    shuffle: bool = True, **options: Any,
) -> tuple[Trace, pl.Trainer]:  # fmt: skip
    """Train ``module`` from a fixed seed and return the values that must be equal."""
    pl.seed_everything(1, verbose=False)
    rows = torch.randint(4, VOCAB, (32, 12)) if rows is None else rows
    trainer = pl.Trainer(
        **{
            "max_steps": 9, "accelerator": "cpu", "logger": CSVLogger(folder), "enable_progress_bar": False,
            "enable_model_summary": False, "log_every_n_steps": 4, "enable_checkpointing": False, **options,
        },
        callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(
        module,
        DataLoader(rows, 4, shuffle=shuffle),
        DataLoader(rows[:4], 4) if options.get("num_sanity_val_steps") else None,
        ckpt_path=ckpt,
    )
    return trace(module, trainer), trainer


def trace(module: Boring, trainer: pl.Trainer) -> Trace:
    return Trace(
        module.losses, module.row_order, {name: value.clone() for name, value in module.state_dict().items()},
        trainer.optimizers[0].state_dict(), trainer.global_step, [submodule.training for submodule in module.modules()],
        generators(),
    )  # fmt: skip


def assert_same(actual: Trace, expected: Trace) -> None:
    assert actual.losses == expected.losses
    assert actual.row_order == expected.row_order
    assert actual.step == expected.step
    assert actual.modes == expected.modes
    assert actual.generators == expected.generators
    assert actual.weights.keys() == expected.weights.keys()
    for name, value in actual.weights.items():
        assert torch.equal(value, expected.weights[name]), name
    for key, state in actual.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(value, expected.optimizer["state"][key][name]), (key, name)
