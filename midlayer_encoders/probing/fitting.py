"""Train the probes of all layers together, each exactly as if it were trained alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Progress
from midlayer_encoders.errors import NotFiniteError
from midlayer_encoders.probing.splits import Split
from midlayer_encoders.probing.tokens import TokenSource
from midlayer_encoders.validation import check_count, check_flag, check_number, check_seed

UNUSED_SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "attentive": ("pools the tokens by itself", ("neighbors",)),
    "linear": ("reads one vector of each example", ("heads", "neighbors", "keep_gb")),
    "knn": (
        "trains nothing",
        ("heads", "keep_gb", "epochs", "patience", "batch_size", "learning_rate", "weight_decay"),
    ),
}
"""For each kind of probe, the :class:`ProbeSettings` without effect and the reason."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Settings of :func:`~midlayer_encoders.probe`.

    Attributes:
        epochs: maximum number of epochs.
        patience: a layer is finished after this many epochs without a better accuracy or loss on the validation
            examples; training ends when all layers are.
        batch_size: examples per step.
        learning_rate: of AdamW at the first step; it decays to zero along a cosine.
        weight_decay: of AdamW.
        heads: attention heads of ``"attentive"``; ``None`` for one per 64 dimensions.
        neighbors: of ``"knn"``.
        keep_gb: memory for cached tokens, in half precision; if they need more, every epoch runs the model again.
        mixture: also learn a weighted mean of layers from the training examples, by their pooled vectors, and score it
            against the best single layer, both with a ridge classifier; see ``ProbeResult.mixture``.
        seed: for split, weights and order.
    """

    epochs: int = 30
    patience: int = 5
    batch_size: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    heads: int | None = None
    neighbors: int = 20
    keep_gb: float = 4.0
    mixture: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        units = {"epochs": "epochs", "patience": "epochs", "batch_size": "examples", "neighbors": "neighbors"}
        checked: dict[str, object] = {
            **{name: check_count(name, getattr(self, name), unit) for name, unit in units.items()},
            "learning_rate": check_number("learning_rate", self.learning_rate),
            "weight_decay": check_number("weight_decay", self.weight_decay),
            "heads": None if self.heads is None else check_count("heads", self.heads),
            "keep_gb": check_number("keep_gb", self.keep_gb),
            "mixture": check_flag("mixture", self.mixture),
            "seed": check_seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


class FittedProbes:
    """Probes of every layer, and the best epoch of each.

    Args:
        head: the probes, :class:`~midlayer_encoders.probing.AttentiveProbes` or ``LinearProbes``.
        patience: a layer is finished after this many epochs without a better accuracy or loss.

    Attributes:
        best_accuracy: validation accuracy of each layer at its best epoch, shape ``(L,)``.
        best_epoch: best epoch of each layer, from ``1``, shape ``(L,)``.
    """

    def __init__(self, head: nn.Module, patience: int) -> None:
        self.head = head
        self._patience = patience
        num_layers = next(head.parameters()).shape[0]
        self.best_accuracy = torch.full((num_layers,), -1.0)
        self.best_epoch = torch.zeros(num_layers, dtype=torch.int64)
        self._best_loss = torch.full((num_layers,), math.inf)
        self._lowest_loss = torch.full((num_layers,), math.inf)
        self._last_improvement = torch.zeros(num_layers, dtype=torch.int64)
        self._best_weights = {name: weights.clone() for name, weights in head.state_dict().items()}

    def update(self, epoch: int, accuracy: Tensor, loss: Tensor) -> bool:
        """Store the weights of the layers that improved; return True if every layer is finished.

        Args:
            epoch: from ``1``.
            accuracy: on the validation examples, shape ``(L,)``.
            loss: on the validation examples, shape ``(L,)``.
        """
        active = epoch - self._last_improvement <= self._patience
        higher = accuracy > self.best_accuracy
        better = active & (higher | ((accuracy == self.best_accuracy) & (loss < self._best_loss)))
        # A small data set has few steps per epoch: its loss may fall long before its accuracy rises.
        improved = active & (higher | (loss < self._lowest_loss))
        self._last_improvement = torch.where(improved, epoch, self._last_improvement)
        self._lowest_loss = torch.where(improved, torch.minimum(loss, self._lowest_loss), self._lowest_loss)
        for name, weights in self.head.state_dict().items():
            is_better = better.to(weights.device)
            self._best_weights[name][is_better] = weights[is_better]
        self.best_accuracy = torch.where(better, accuracy, self.best_accuracy)
        self._best_loss = torch.where(better, loss, self._best_loss)
        self.best_epoch = torch.where(better, epoch, self.best_epoch)
        return not bool((epoch - self._last_improvement < self._patience).any())

    def restore_best(self) -> None:
        """Give each layer the weights of its best epoch."""
        self.head.load_state_dict(self._best_weights)
        self.head.eval()


def train_probes(
    head: nn.Module,
    source: TokenSource,
    labels: Tensor,
    split: Split,
    *,
    settings: ProbeSettings | None = None,
    progress: Progress | None = None,
) -> FittedProbes:
    """Train the probes of all layers in place and return them, each with the weights of its best epoch.

    The loss is the sum of the layers' losses, so no layer's gradient depends on another layer, and AdamW updates every
    weight independently: each probe becomes what it would have become alone.

    Args:
        head: probes of as many layers as ``source`` has; trained on its device.
        source: tokens of every layer.
        labels: classes from ``0`` of all examples, shape ``(N,)``.
        split: which examples train and choose the epoch.
        settings: of the training.
        progress: called after each epoch, with the stage ``"training"``.
    """
    settings = settings or ProbeSettings()
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, betas=(0.9, 0.95)
    )
    steps = settings.epochs * math.ceil(len(split.train) / settings.batch_size)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    fitted = FittedProbes(head, settings.patience)
    for epoch in range(1, settings.epochs + 1):
        head.train()
        order = split.train[torch.randperm(len(split.train), generator=generator)]
        for index in torch.split(order, settings.batch_size):
            optimizer.zero_grad()
            _, losses = _evaluate(head, source, labels, index)
            losses.mean(dim=1).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        finished = fitted.update(epoch, *_validate(head, source, labels, split.validation, settings.batch_size))
        if progress is not None:
            progress("training", epoch, settings.epochs)
        if finished:
            break
    fitted.restore_best()
    return fitted


@torch.no_grad()
def _validate(head: nn.Module, source: TokenSource, labels: Tensor, index: Tensor, batch_size: int) -> Tensor:
    """Return accuracy and loss of each layer, shape ``(2, L)``, on the CPU."""
    head.eval()
    parts = []
    for part in torch.split(index, batch_size):
        is_correct, losses = _evaluate(head, source, labels, part)
        parts.append(torch.stack([is_correct.double(), losses.double()]))
    accuracy, loss = torch.cat(parts, dim=2).mean(dim=2).cpu()
    if not bool(loss.isfinite().all()):
        raise NotFiniteError(
            f"The probe of layer number {int((~loss.isfinite()).nonzero()[0])} of the requested layers has the loss "
            f"{float(loss[~loss.isfinite()][0])}. Try a smaller `learning_rate`, or check the model's states."
        )
    return torch.stack([accuracy, loss])


def _evaluate(head: nn.Module, source: TokenSource, labels: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each layer is correct about each example, and its loss, both of shape ``(L, B)``."""
    states, mask = source.batch(index)
    device = next(head.parameters()).device
    logits = head(states.to(device), mask.to(device))
    targets = labels[index].to(device)
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.repeat(len(logits)), reduction="none")
    return logits.argmax(dim=-1) == targets, losses.view(logits.shape[:2])


@torch.no_grad()
def predict(head: nn.Module, source: TokenSource, index: Tensor, *, batch_size: int = 256) -> Tensor:
    """Return the class that each layer's probe predicts for the examples at ``index``, shape ``(L, M)``, on the CPU."""
    head.eval()
    parts = [head(*source.batch(part)).argmax(dim=-1).cpu() for part in torch.split(index, batch_size)]
    return torch.cat(parts, dim=1)
