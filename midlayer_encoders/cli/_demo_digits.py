"""The images and the model of the vision demo: scikit-learn's handwritten digits, and a small model trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Progress

_SIZE = 16
_WIDTH = 96
_NUM_TRAIN = 1437


class Digits(NamedTuple):
    """Images of handwritten digits, and their labels."""

    images: list[Image.Image]
    labels: list[int]

    def only(self, digits: Sequence[int]) -> Digits:
        """Return the images of some digits."""
        pairs = [(image, label) for image, label in zip(*self, strict=True) if label in digits]
        return Digits([image for image, _ in pairs], [label for _, label in pairs])


def read_digits() -> tuple[Digits, Digits]:
    """Return 1437 training and 360 test digits of 8 x 8 pixels from scikit-learn, enlarged to 16 x 16."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    small_images = [Image.fromarray((pixels * 15.9375).astype("uint8")) for pixels in bunch.images]
    images = [image.resize((_SIZE, _SIZE), Image.Resampling.BICUBIC).convert("RGB") for image in small_images]
    labels = bunch.target.tolist()
    return Digits(images[:_NUM_TRAIN], labels[:_NUM_TRAIN]), Digits(images[_NUM_TRAIN:], labels[_NUM_TRAIN:])


def train_digit_model(
    folder: Path | str, digits: Digits, *, epochs: int = 25, seed: int = 0, progress: Progress | None = None
) -> str:
    """Train a vision transformer of 6 blocks to recognize digits, save it, and return the path of its folder.

    A linear classifier on the mean of the last layer's tokens is trained with it and discarded.

    Args:
        folder: folder for the model and its image processor.
        digits: training images.
        epochs: number of epochs.
        seed: seed of the initial weights and of the order; the global generator does not change.
        progress: called after each epoch.
    """
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    processor = ViTImageProcessorPil(size={"height": _SIZE, "width": _SIZE})
    pixels: Tensor = processor(digits.images, return_tensors="pt")["pixel_values"]
    labels = torch.tensor(digits.labels)
    shape = {"hidden_size": _WIDTH, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 4 * _WIDTH}
    with isolated_random():
        torch.manual_seed(seed)
        model: Any = ViTModel(ViTConfig(image_size=_SIZE, patch_size=4, **shape))
        classifier = nn.Linear(_WIDTH, int(labels.max()) + 1)
        weights = [*model.parameters(), *classifier.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.05)
        steps = epochs * -(-len(pixels) // 64)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps, pct_start=0.2)
        for epoch in range(1, epochs + 1):
            for index in torch.split(torch.randperm(len(pixels)), 64):
                shifted = torch.roll(pixels[index], torch.randint(-1, 2, (2,)).tolist(), (2, 3))
                means = model(pixel_values=shifted).last_hidden_state.mean(dim=1)
                loss = nn.functional.cross_entropy(classifier(means), labels[index])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            if progress is not None:
                progress("epochs of the model", epoch, epochs)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)
