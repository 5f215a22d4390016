"""Seeded views of images (crop, flip, color) and of waveforms (shift, gain, noise), computed on access."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from midlayer_encoders._types import MAX_PIXELS, content_digest
from midlayer_encoders.reading.media_inputs import Waveform, read_audio, read_image
from midlayer_encoders.validation import check_choice, check_count

if TYPE_CHECKING:
    from PIL.Image import Image

_AREA = (0.4, 1.0)  # share of the image's area in a crop
_RATIO = (3 / 4, 4 / 3)  # aspect ratio of a crop relative to the image
_COLOR = (0.6, 1.4)  # factor of brightness, contrast and saturation
_SHIFT = 0.1  # largest shift as a share of the length
_GAIN = 6.0  # decibels, up or down
_NOISE = (10.0, 30.0)  # signal-to-noise ratio in decibels


def augment_media(
    items: Sequence[Any],
    medium: Literal["image", "audio"],
    *,
    views: int = 2,
    seed: int = 0,
    max_pixels: int = MAX_PIXELS,
) -> list[Sequence[Any]]:
    """Return V views of every image or waveform, each a sequence of N items that computes a view on access.

    A view depends on the pixels or samples, ``seed`` and the view's number, but not on the other inputs, their order or
    the machine. Equal inputs have equal views.

    Args:
        items: N images or waveforms in any supported form.
        medium: ``"image"`` or ``"audio"``.
        views: number V of views.
        seed: seed of the views.
        max_pixels: limit for an image.
    """
    check_choice("medium", medium, ("image", "audio"))
    check_count("views", views)

    def make(item: Any, view: int) -> Any:
        if medium == "image":
            return image_view(read_image(item, max_pixels=max_pixels), seed=seed, view=view)
        return audio_view(read_audio(item), seed=seed, view=view)

    return [_Views(items, partial(make, view=view)) for view in range(views)]


class _Views(Sequence[Any]):
    """A view of each input; nothing is cached, so sixteen views need the memory of one batch."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._make(item) for item in self._items[index]]
        return self._make(self._items[index])


def image_view(image: Image, *, seed: int = 0, view: int = 0) -> Image:
    """Return a random crop at the original size with random mirroring and colors.

    The crop covers 0.4 to 1 of the area, and its aspect ratio differs from the image's by a factor of up to 4/3. Half
    of the crops are mirrored. Brightness, contrast and saturation are each scaled by 0.6 to 1.4.

    Args:
        image: an RGB image.
        seed: seed of the view.
        view: number of the view.

    Example:
        >>> from PIL import Image
        >>> image_view(Image.new("RGB", (40, 30), "teal"), view=3).size
        (40, 30)
    """
    from PIL import Image as Pillow
    from PIL import ImageEnhance, ImageOps

    draw = _generator(seed, view, image.size, image.tobytes())
    width, height = image.size
    area, ratio = draw.uniform(*_AREA), np.exp(draw.uniform(*np.log(_RATIO)))
    across = max(1, min(width, round(width * float(np.sqrt(area * ratio)))))
    down = max(1, min(height, round(height * float(np.sqrt(area / ratio)))))
    left, top = int(draw.integers(0, width - across + 1)), int(draw.integers(0, height - down + 1))
    box = (left, top, left + across, top + down)
    augmented = image.resize(image.size, Pillow.Resampling.BICUBIC, box=box)
    if draw.random() < 0.5:
        augmented = ImageOps.mirror(augmented)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        augmented = enhance(augmented).enhance(draw.uniform(*_COLOR))
    return augmented


def audio_view(waveform: Waveform, *, seed: int = 0, view: int = 0) -> Waveform:
    """Return a waveform of the same length with a random shift, gain and noise.

    The shift is at most a tenth of the length and is filled with silence, the gain is at most 6 dB in either direction,
    and the noise is 10 to 30 dB below the waveform.

    Args:
        waveform: samples and rate.
        seed: seed of the view.
        view: number of the view.

    Example:
        >>> view = audio_view({"array": np.ones(100, dtype=np.float32), "sampling_rate": 16000})
        >>> view["array"].shape, view["sampling_rate"]
        ((100,), 16000)
    """
    samples = waveform["array"]
    draw = _generator(seed, view, samples.shape, samples.tobytes())
    max_shift = int(_SHIFT * len(samples))
    shift = int(draw.integers(-max_shift, max_shift + 1))
    moved = np.zeros_like(samples)
    moved[max(shift, 0) : len(samples) + min(shift, 0)] = samples[max(-shift, 0) : len(samples) - max(shift, 0)]
    loud = moved * np.float32(10 ** (draw.uniform(-_GAIN, _GAIN) / 20))
    power = float(np.sqrt(np.mean(loud.astype(np.float64) ** 2)))
    noise = draw.standard_normal(len(samples)) * power * 10 ** (-draw.uniform(*_NOISE) / 20)
    return {"array": (loud + noise).astype(np.float32), "sampling_rate": waveform["sampling_rate"]}


def _generator(seed: int, view: int, shape: object, content: bytes) -> np.random.Generator:
    return np.random.default_rng(int(content_digest(f"{seed} {view} {shape} ".encode() + content, 16), 16))
