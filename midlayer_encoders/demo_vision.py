"""The model and images of the vision demo: scikit-learn's handwritten digits, and a small model trained on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Digits", "read_digits", "train_digit_model"]

_SIZE, _PATCH, _WIDTH, _BLOCKS = 16, 4, 96, 6


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits and which digit each is."""

    images: list[Image]
    labels: list[int]


def read_digits() -> tuple[Digits, Digits]:
    """Return 1437 digits to train on and 360 to test on: real ones, 8 x 8 pixels, that come with scikit-learn.

    They are enlarged to 16 x 16. The test digits are the last of the file, by other writers than most of the first.
    """
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    drawn = [Image.fromarray((pixels * 15.9375).astype("uint8")) for pixels in bunch.images]
    images = [image.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC).convert("RGB") for image in drawn]
    labels, cut = [int(label) for label in bunch.target], 1437
    return Digits(images[:cut], labels[:cut]), Digits(images[cut:], labels[cut:])


def train_digit_model(
    folder: Path | str,
    images: list[Image],
    *,
    epochs: int = 40,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> str:
    """Train a masked autoencoder of 6 blocks on images, without labels, write it to ``folder`` and return its path.

    Three quarters of each image's patches are hidden and painted from the others (He et al., 2022), by transformers'
    own model, from random weights.

    Args:
        folder: where model and image processor go.
        images: what to train on.
        epochs: passes over them.
        seed: of weights, order and hidden patches; the global generator is left as it was.
        progress: told the epoch, the number of epochs and the loss.
    """
    from transformers import ViTImageProcessorPil, ViTMAEConfig, ViTMAEForPreTraining

    processor = ViTImageProcessorPil(size={"height": _SIZE, "width": _SIZE})
    pixels: Tensor = processor(images, return_tensors="pt")["pixel_values"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ViTMAEForPreTraining(
            ViTMAEConfig(
                image_size=_SIZE, patch_size=_PATCH, hidden_size=_WIDTH, num_hidden_layers=_BLOCKS,
                num_attention_heads=4, intermediate_size=4 * _WIDTH, decoder_hidden_size=64,
                decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=128,
                norm_pix_loss=True,
            )
        )  # fmt: skip
        _fit(model, pixels, epochs, progress)
    model.vit.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def _fit(model: Any, pixels: Tensor, epochs: int, progress: Callable[[int, int, float], None] | None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05)
    batch_size = 128
    steps = epochs * -(-len(pixels) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.5e-3, total_steps=steps, pct_start=0.1)
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.split(torch.randperm(len(pixels)), batch_size):
            loss = model(pixel_values=pixels[index]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        if progress is not None:
            progress(epoch, epochs, sum(losses) / len(losses))
