"""The model and images of the vision demo: scikit-learn's handwritten digits, and a small model trained on the spot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from midlayer_encoders._isolation import isolated_random

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Digits", "read_digits", "train_digit_model"]

_SIZE, _PATCH, _WIDTH, _BLOCKS = 16, 4, 96, 6


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits and which digit each is."""

    images: list[Image]
    labels: list[int]

    def only(self, digits: Sequence[int]) -> Digits:
        """Return those that show one of some digits."""
        kept = [place for place, label in enumerate(self.labels) if label in digits]
        return Digits([self.images[place] for place in kept], [self.labels[place] for place in kept])


def read_digits() -> tuple[Digits, Digits]:
    """Return 1437 digits to train on and 360 to test on: real ones, 8 x 8 pixels, that come with scikit-learn.

    They are enlarged to 16 x 16. The test digits are the last of the file.
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
    digits: Digits,
    *,
    epochs: int = 25,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
) -> str:
    """Train a vision transformer of 6 blocks to name digits, write it to ``folder`` and return its path.

    From random weights, by a linear classifier on the mean of the last layer's tokens, which is thrown away.

    Args:
        folder: where model and image processor go.
        digits: what to train on.
        epochs: passes over them.
        seed: of weights and order; the global generator is left as it was.
        progress: told the epoch, the number of epochs and the loss.
    """
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    processor = ViTImageProcessorPil(size={"height": _SIZE, "width": _SIZE})
    pixels: Tensor = processor(digits.images, return_tensors="pt")["pixel_values"]
    config = ViTConfig(
        image_size=_SIZE, patch_size=_PATCH, hidden_size=_WIDTH, num_hidden_layers=_BLOCKS, num_attention_heads=4,
        intermediate_size=4 * _WIDTH,
    )  # fmt: skip
    with isolated_random():
        torch.manual_seed(seed)
        model = ViTModel(config)
        _fit(model, pixels, torch.tensor(digits.labels), epochs, progress)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def _fit(
    model: Any, pixels: Tensor, labels: Tensor, epochs: int, progress: Callable[[int, int, float], None] | None
) -> None:
    classifier = nn.Linear(_WIDTH, int(labels.max()) + 1)
    weights = [*model.parameters(), *classifier.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.05)
    steps = epochs * -(-len(pixels) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.2)
    for epoch in range(1, epochs + 1):
        losses = []
        for index in torch.split(torch.randperm(len(pixels)), 64):
            shifted = torch.roll(pixels[index], torch.randint(-1, 2, (2,)).tolist(), (2, 3))
            means = model(pixel_values=shifted).last_hidden_state.mean(dim=1)
            loss = nn.functional.cross_entropy(classifier(means), labels[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
        if progress is not None:
            progress(epoch, epochs, sum(losses) / len(losses))
