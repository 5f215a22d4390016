"""The Lightning module that trains the probes of all layers together, each as if it were alone."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Progress
from midlayer_encoders.errors import NotFiniteError
from midlayer_encoders.probing.settings import ProbeTraining
from midlayer_encoders.probing.tokens import TokenSource

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
else:
    try:
        from lightning.pytorch import LightningModule, Trainer
    except ImportError:  # the same under its other name
        from pytorch_lightning import LightningModule, Trainer

__all__ = ["LayerProbes", "TokenBatches", "predict", "train_probes"]


@dataclass(frozen=True)
class TokenBatches:
    """Batches of tokens, mask and labels, for a trainer: shuffled anew in each epoch where a seed is given.

    Attributes:
        source: gives the tokens.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        index: which examples, shape ``(M,)``.
        batch_size: examples in a batch; the last may be short.
        generator: shuffles; ``None`` keeps the order.
    """

    source: TokenSource
    labels: Tensor
    index: Tensor
    batch_size: int
    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.index) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        order = self.index
        if self.generator is not None:
            order = order[torch.randperm(len(order), generator=self.generator)]
        for index in torch.split(order, self.batch_size):
            states, mask = self.source.batch(index)
            yield states, mask, self.labels[index].to(mask.device, non_blocking=True)


class LayerProbes(LightningModule):
    """Trains the probes of many layers from the same tokens; each layer keeps its own best epoch.

    The loss is the sum of the layers' losses, so no layer's gradient depends on another layer, and AdamW treats every
    weight by itself: a layer's probe becomes what it would have become alone.

    Args:
        head: the probes, :class:`~midlayer_encoders.probing.heads.AttentiveProbes` or ``LinearProbes``.
        training: how.
        progress: called after each epoch, with the stage ``"training"``.

    Attributes:
        best_accuracy: on the validation examples, of each layer's best epoch, shape ``(L,)``.
        best_epoch: which epoch that was, from ``1``, shape ``(L,)``.
    """

    def __init__(
        self,
        head: nn.Module,
        training: ProbeTraining | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.given = training or ProbeTraining()  # Lightning has a `training` of its own
        self._progress = progress
        layers = next(head.parameters()).shape[0]
        self.best_accuracy = torch.full((layers,), -1.0)
        self.best_loss = torch.full((layers,), math.inf)
        self.best_epoch = torch.zeros(layers, dtype=torch.int64)
        self._lowest = torch.full((layers,), math.inf)
        self._moved = torch.zeros(layers, dtype=torch.int64)
        self._best: dict[str, Tensor] = {}
        self._seen: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> Tensor:
        """Return the sum of the layers' losses."""
        states, mask, labels = batch
        return _losses(self.head(states, mask), labels).mean(dim=1).sum()

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], _: int) -> None:
        """Note which layers are right, and their losses."""
        states, mask, labels = batch
        logits = self.head(states, mask)
        right = (logits.argmax(dim=-1) == labels).double()
        self._seen.append(torch.stack([right, _losses(logits, labels).double()]))

    def on_validation_epoch_end(self) -> None:
        """Keep the weights of the layers that are better than ever; end when no layer has been for long."""
        accuracy, loss = torch.cat(self._seen, dim=2).mean(dim=2).cpu()
        self._seen.clear()
        if not bool(loss.isfinite().all()):
            raise NotFiniteError(
                f"The probe of layer number {int((~loss.isfinite()).nonzero()[0])} of those asked for has the loss "
                f"{float(loss[~loss.isfinite()][0])}. Try a smaller `learning_rate`, or check the model's states."
            )
        epoch = self.current_epoch + 1
        waiting = epoch - self._moved <= self.given.patience
        equal = accuracy == self.best_accuracy
        better = waiting & ((accuracy > self.best_accuracy) | (equal & (loss < self.best_loss)))
        # A small data set has few steps an epoch: its loss may fall for long before its accuracy rises.
        moved = waiting & ((accuracy > self.best_accuracy) | (loss < self._lowest))
        self._moved = torch.where(moved, epoch, self._moved)
        self._lowest = torch.where(moved, torch.minimum(loss, self._lowest), self._lowest)
        self._keep(better)
        self.best_accuracy = torch.where(better, accuracy, self.best_accuracy)
        self.best_loss = torch.where(better, loss, self.best_loss)
        self.best_epoch = torch.where(better, epoch, self.best_epoch)
        if self._progress is not None:
            self._progress("training", epoch, int(self.trainer.max_epochs or 0))
        if not bool((epoch - self._moved < self.given.patience).any()):
            self.trainer.should_stop = True

    def on_fit_end(self) -> None:
        """Give each layer the weights of its best epoch."""
        self.head.load_state_dict(self._best)

    def configure_optimizers(self) -> Any:
        """Return AdamW, whose rate falls along a cosine over all steps."""
        given = self.given
        optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=given.learning_rate, weight_decay=given.weight_decay, betas=(0.9, 0.95)
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _keep(self, better: Tensor) -> None:
        for name, now in self.head.state_dict().items():
            if name not in self._best:
                self._best[name] = now.clone()
            which = better.to(now.device)
            self._best[name][which] = now[which]


def train_probes(
    head: nn.Module,
    source: TokenSource,
    labels: Tensor,
    *,
    train: Tensor,
    validation: Tensor,
    training: ProbeTraining | None = None,
    progress: Progress | None = None,
) -> LayerProbes:
    """Return the trained probes, each layer at its best epoch on the validation examples.

    Args:
        head: probes of as many layers as ``source`` has; trained in place, on the device it lies on.
        source: gives the tokens of every layer.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        train: which examples to train on.
        validation: which examples to choose the epoch by.
        training: how.
        progress: called after each epoch, with the stage ``"training"``.
    """
    given = training or ProbeTraining()
    probes = LayerProbes(head, given, progress=progress)
    device = next(head.parameters()).device
    generator = torch.Generator().manual_seed(given.seed)
    with _quiet():
        trainer = Trainer(
            accelerator=device.type, devices=[device.index or 0] if device.type == "cuda" else 1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            max_epochs=given.epochs, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(
            probes,
            TokenBatches(source, labels, train, given.batch_size, generator),
            TokenBatches(source, labels, validation, given.batch_size),
        )
    probes.head.to(device).eval()
    return probes


@torch.no_grad()
def predict(head: nn.Module, source: TokenSource, index: Tensor, *, batch_size: int = 256) -> Tensor:
    """Return the class that each layer's probe names for the examples at ``index``, shape ``(L, M)``, on the CPU."""
    head.eval()
    return torch.cat([head(*source.batch(some)).argmax(dim=-1).cpu() for some in torch.split(index, batch_size)], dim=1)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each layer and example, shape ``(L, B)``, of logits ``(L, B, C)``."""
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return losses.view(logits.shape[:2])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the trainer's notices about devices and tips off the screen."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # lightning's use of torch
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
