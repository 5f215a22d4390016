"""CIFAR-10 as one tensor on the device, and augmentation there: no worker, no copy in a step."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

__all__ = ["ImageBatches", "augmented", "jittered", "normalised", "read_zip"]

_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def read_zip(path: Path, *, limit: int | None = None) -> tuple[Tensor, Tensor, list[str]]:
    """Return images ``(N, 3, H, W)`` uint8, their classes ``(N,)`` and the classes' names, of a zip of class folders."""
    with zipfile.ZipFile(path) as opened:
        names = sorted(name for name in opened.namelist() if name.lower().endswith((".jpg", ".jpeg", ".png")))
        names = names[:: math.ceil(len(names) / limit)] if limit else names
        files = [opened.read(name) for name in names]
    folders = [name.split("/")[-2] for name in names]
    classes = sorted(set(folders))
    with ThreadPoolExecutor() as pool:
        arrays = list(pool.map(lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), files))
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([classes.index(folder) for folder in folders]), classes


@dataclass(frozen=True)
class ImageBatches:
    """Shuffled batches of images and labels that lie on the device; the last short one is left out."""

    images: Tensor
    labels: Tensor
    batch_size: int
    generator: torch.Generator

    def __len__(self) -> int:
        return len(self.images) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images), generator=self.generator).to(self.images.device)
        for index in order[: len(self) * self.batch_size].split(self.batch_size):
            yield self.images[index], self.labels[index]


def normalised(images: Tensor) -> Tensor:
    """Return images as floats of about zero mean and unit variance."""
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (_MEAN, _STD))
    return (images.float() / 255 - mean) / std


def augmented(images: Tensor, *, smallest: float = 0.4, generator: torch.Generator | None = None) -> Tensor:
    """Return normalised images, each cropped to a random share of its area, resized back, and flipped or not."""
    B, device = len(images), images.device
    drawn = torch.rand(4, B, generator=generator, device=generator.device if generator else device).to(device)
    side = (smallest + (1 - smallest) * drawn[0]).sqrt()
    flip = torch.where(drawn[1] < 0.5, -1.0, 1.0)
    shift_x, shift_y = ((2 * drawn[k] - 1) * (1 - side) for k in (2, 3))
    zero = torch.zeros_like(side)
    rows = [torch.stack([flip * side, zero, shift_x], dim=1), torch.stack([zero, side, shift_y], dim=1)]
    grid = torch.nn.functional.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return torch.nn.functional.grid_sample(normalised(images), grid, align_corners=False, padding_mode="reflection")


def jittered(images: Tensor) -> Tensor:
    """Return augmented images with brightness, contrast and saturation changed, and one in five grey, as DINO's."""
    B, device = len(images), images.device
    drawn = torch.rand(4, B, 1, 1, 1, device=device)
    images = augmented(images) * (0.6 + 0.8 * drawn[0]) + 0.8 * (drawn[1] - 0.5)
    grey = images.mean(dim=1, keepdim=True)
    kept = torch.where(drawn[3] < 0.2, 0.0, 0.4 + 0.8 * drawn[2])
    return grey + (images - grey) * kept
