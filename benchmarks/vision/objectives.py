"""Four ways to train the same trunk: labels, masked patches, the next patch, and agreement of two views."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.vision.images import augmented, jittered
from benchmarks.vision.model import Block, PatchTransformer, prefix_mask, to_patches

try:
    from lightning.pytorch import LightningModule
except ImportError:  # the same under its other name
    from pytorch_lightning import LightningModule

__all__ = ["OBJECTIVES", "Objective"]


class Objective(LightningModule):
    """A trunk and what trains it; only :meth:`loss` differs between objectives."""

    def __init__(self, trunk: PatchTransformer, *, classes: int, learning_rate: float, compiled: bool) -> None:
        super().__init__()
        self.trunk = trunk
        self.learning_rate = learning_rate
        self.compiled, self.classes = compiled, classes
        self.losses: list[Tensor] = []
        self.make_heads(trunk.width)
        self._loss = torch.compile(self.loss, dynamic=False) if compiled else self.loss

    def make_heads(self, width: int) -> None:
        """Make what stands on the trunk in training and is thrown away after it."""
        raise NotImplementedError

    def loss(self, *views: Tensor) -> Tensor:
        """Return the loss of what :meth:`views` made of a batch."""
        raise NotImplementedError

    def views(self, images: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        return (augmented(images),)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            views = self.views(*batch)
        loss = self._loss(*views)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        wide = [p for p in self.parameters() if p.requires_grad and p.ndim > 1]
        thin = [p for p in self.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": wide, "weight_decay": 0.05}, {"params": thin, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        warm = max(1, steps // 20)

        def rate(step: int) -> float:
            return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Supervised(Objective):
    """A linear classifier on the mean of the last layer's patches."""

    def make_heads(self, width: int) -> None:
        self.classifier = nn.Linear(width, self.classes)

    def views(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return augmented(images), labels

    def loss(self, *views: Tensor) -> Tensor:
        images, labels = views
        return nn.functional.cross_entropy(self.classifier(self.trunk(images).mean(dim=1)), labels, label_smoothing=0.1)


class MaskedReconstruction(Objective):
    """MAE (He et al., 2022): a quarter of the patches is encoded, a small decoder paints the others."""

    def make_heads(self, width: int) -> None:
        self.blank = nn.Parameter(torch.randn(width) * 0.02)
        self.decoder = nn.ModuleList(Block(width, self.trunk.blocks[0].attention.heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.paint = nn.Linear(width, 3 * self.trunk.patch**2)

    def loss(self, *views: Tensor) -> Tensor:
        (images,) = views
        wanted = targets(images, self.trunk.patch)
        B, T, _ = wanted.shape
        order = torch.rand(B, T, device=images.device).argsort(dim=1)
        kept, back = order[:, : T // 4], order.argsort(dim=1)
        seen = self.trunk(images, kept=kept)
        states = torch.cat([seen, self.blank.to(seen.dtype).expand(B, T - T // 4, -1)], dim=1)
        states = states.gather(1, back[:, :, None].expand_as(states)) + self.trunk.positions.to(seen.dtype)
        for block in self.decoder:
            states = block(states)
        errors = (self.paint(self.norm(states)).float() - wanted).square().mean(dim=-1)
        hidden = (back >= T // 4).float()
        return (errors * hidden).sum() / hidden.sum()


class NextPatch(Objective):
    """AIM (El-Nouby et al., 2024): each patch after a prefix of random length is predicted from those before it."""

    def make_heads(self, width: int) -> None:
        # AIM's heads are MLP blocks on each patch, half as many as the trunk has blocks.
        depth = max(1, len(self.trunk.blocks) // 2)
        self.head = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.paint = nn.Linear(width, 3 * self.trunk.patch**2)

    def loss(self, *views: Tensor) -> Tensor:
        (images,) = views
        wanted = targets(images, self.trunk.patch)
        B, T, _ = wanted.shape
        prefix = torch.randint(1, T, (B,), device=images.device)
        states = self.trunk(images, mask=prefix_mask(prefix, T))
        for block in self.head:
            states = states + block(states)
        errors = (self.paint(self.norm(states))[:, :-1].float() - wanted[:, 1:]).square().mean(dim=-1)
        after = (torch.arange(1, T, device=images.device) >= prefix[:, None]).float()
        return (errors * after).sum() / after.sum()


class SelfDistillation(Objective):
    """DINO (Caron et al., 2021) with two crops: the student names what a slow copy of it sees in the other crop."""

    prototypes, temperature, teacher_temperature = 1024, 0.1, 0.04
    centre: Tensor

    def make_heads(self, width: int) -> None:
        self.head = nn.Sequential(nn.Linear(width, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 128))
        self.last = nn.Linear(128, self.prototypes, bias=False)
        self.teacher = nn.ModuleList(copy.deepcopy(part) for part in (self.trunk, self.head, self.last))
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(self.prototypes))
        self._teach = torch.compile(self.teach, dynamic=False) if self.compiled else self.teach

    def views(self, images: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        pairs = torch.cat([jittered(images), jittered(images)])
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            taught = self._teach(pairs)
        goal = ((taught - self.centre) / self.teacher_temperature).softmax(dim=-1)
        self.centre.lerp_(taught.mean(dim=0), 0.1)
        return pairs, goal.roll(len(images), dims=0)

    def loss(self, *views: Tensor) -> Tensor:
        pairs, goal = views
        said = (_named(self.trunk, self.head, self.last, pairs) / self.temperature).log_softmax(dim=-1)
        return -(goal * said).sum(dim=-1).mean()

    def teach(self, pairs: Tensor) -> Tensor:
        return _named(self.teacher[0], self.teacher[1], self.teacher[2], pairs)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        """Let the teacher follow."""
        share = 0.5 + 0.5 * math.cos(math.pi * self.global_step / max(1, int(self.trainer.estimated_stepping_batches)))
        slow = list(self.teacher.parameters())
        fast = [p for part in (self.trunk, self.head, self.last) for p in part.parameters()]
        torch._foreach_lerp_(slow, fast, 0.004 * share)


def _named(trunk: nn.Module, head: nn.Module, last: nn.Linear, images: Tensor) -> Tensor:
    """Return the similarity of each image to each prototype, ``(B, prototypes)``."""
    seen = nn.functional.normalize(head(trunk(images).mean(dim=1)).float(), dim=-1)
    return (seen @ nn.functional.normalize(last.weight.float(), dim=-1).mT).float()


def targets(images: Tensor, patch: int) -> Tensor:
    """Return the pixels of each patch, normalised within it, as MAE and AIM predict them."""
    pixels = to_patches(images, patch)
    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return (pixels - mean) * torch.rsqrt(variance + 1e-6)


OBJECTIVES: dict[str, type[Objective]] = {
    "supervised": Supervised,
    "masked": MaskedReconstruction,
    "autoregressive": NextPatch,
    "distilled": SelfDistillation,
}
