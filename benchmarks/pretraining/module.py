"""The Lightning module that trains any variant, and the schedule they share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.pretraining.models import LanguageModel, task_of
from benchmarks.pretraining.variants import Variant

try:
    import lightning.pytorch as pl
except ModuleNotFoundError:  # a GPU machine may have the older package alone
    import pytorch_lightning as pl  # type: ignore[no-redef]

__all__ = ["Pretraining", "adamw", "pl", "rate"]

WARMUP = 100  # steps, whatever the length of the run


def rate(step: int, *, steps: int, warmup: int) -> float:
    """Return the share of the peak learning rate: a line up, then half a cosine down to a tenth.

    Example:
        >>> [round(rate(step, steps=100, warmup=10), 2) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def adamw(module: Any, *, peak: float, steps: int, warmup: int, decay: float = 0.1) -> dict[str, Any]:
    """Return AdamW, with weight decay on matrices alone, and the schedule, as ``configure_optimizers`` does."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=parameters[0].is_cuda)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps=steps, warmup=warmup))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Pretraining(pl.LightningModule):
    """Trains a language model on windows of ids.

    Args:
        model: its backbone is what the callback measures.
        variant: decides inputs, targets and optimizer.
        compiled: whether to compile the blocks and the loss.
    """

    def __init__(self, model: LanguageModel, variant: Variant, *, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.variant = model, variant
        if compiled:
            model.compile_training()
        self.losses: list[Tensor] = []
        self._drawn: Tensor | None = None

    def on_fit_start(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)
        if self._drawn is not None:
            self.generator.set_state(self._drawn.cpu())

    def training_step(self, windows: Tensor) -> Tensor:
        loss: Tensor = self.model(*task_of(self.variant, windows, self.generator))
        self.losses.append(loss.detach())  # left on the device: reading it each step would wait for the step
        return loss

    def configure_optimizers(self) -> Any:
        given = self.variant
        warmup = min(WARMUP, max(1, given.steps // 20))
        return adamw(self, peak=given.peak, steps=given.steps, warmup=warmup, decay=given.decay)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        # Lightning refuses to clip for a fused optimizer, because of float16's scaler; in bfloat16 there is none.
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["drawn"] = self.generator.get_state()
        checkpoint["losses"] = torch.stack(self.losses).float().cpu()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._drawn = checkpoint["drawn"]
        self.losses = list(checkpoint["losses"].to(self.device))

    @torch.no_grad()
    def held_out_loss(self, windows: Tensor, batch: int = 64) -> float:
        """Return the mean loss over windows, under the same draws each time; draws from no shared generator."""
        generator = torch.Generator(windows.device).manual_seed(0)
        inputs, targets = task_of(self.variant, windows, generator)
        losses = [self.model(*pair) for pair in zip(inputs.split(batch), targets.split(batch), strict=True)]
        return float(torch.stack(losses).mean())
