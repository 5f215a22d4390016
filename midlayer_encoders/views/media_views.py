"""Seeded views of images (crop, flip, color) and of waveforms (shift, gain, noise), made when they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from midlayer_encoders._types import MAX_PIXELS
from midlayer_encoders.errors import OptionError, deprecated_names
from midlayer_encoders.media import Waveform, read_audio, read_image
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["audio_view", "augment_media", "image_view"]

_AREA = (0.4, 1.0)  # share of the image that a crop keeps
_RATIO = (3 / 4, 4 / 3)  # of a crop's sides, against those of the image
_COLOR = (0.6, 1.4)  # factor of brightness, contrast and saturation
_SHIFT = 0.1  # share of a waveform's length by which it moves, at the most
_GAIN = 6.0  # decibels, up or down
_NOISE = (10.0, 30.0)  # decibels by which the waveform is above the noise


def augment_media(
    items: Sequence[Any],
    medium: Literal["image", "audio"],
    *,
    views: int = 2,
    seed: int = 0,
    max_pixels: int = MAX_PIXELS,
) -> list[Sequence[Any]]:
    """Return V views of every image or waveform, each a sequence of N that makes a view when it is looked up.

    A view is a function of the pixels or samples, ``seed`` and the view's number: not of the other inputs, their order
    or the machine. So equal inputs have equal views.

    Args:
        items: N images or waveforms, in any form that is read.
        medium: which of the two.
        views: number V of views.
        seed: another seed, other views.
        max_pixels: of an image.
    """
    check_choice("medium", medium, ("image", "audio"))
    if views < 1:
        raise OptionError(f"`views` must be at least 1, but got {views}.")

    def make(view: int) -> Callable[[Any], Any]:
        if medium == "image":
            return lambda item: image_view(read_image(item, max_pixels=max_pixels), seed=seed, view=view)
        return lambda item: audio_view(read_audio(item), seed=seed, view=view)

    return [_Views(items, make(view)) for view in range(views)]


class _Views(Sequence[Any]):
    """One view of each of a list of inputs; nothing is kept, so that sixteen views take the memory of one batch."""

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._make(item) for item in self._items[index]]
        return self._make(self._items[index])


def image_view(image: Image, *, seed: int = 0, view: int = 0) -> Image:
    """Return a part of an image at the image's size, perhaps mirrored, in other colors.

    The part covers 0.4 to 1 of the area, with sides up to 4/3 from the image's own proportion; one in two is mirrored;
    brightness, contrast and saturation are each scaled by 0.6 to 1.4.

    Args:
        image: in RGB.
        seed: another seed, another view.
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
    made = image.resize(image.size, Pillow.Resampling.BICUBIC, box=box)
    if draw.random() < 0.5:
        made = ImageOps.mirror(made)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        made = enhance(made).enhance(draw.uniform(*_COLOR))
    return made


def audio_view(waveform: Waveform, *, seed: int = 0, view: int = 0) -> Waveform:
    """Return a waveform of the same length, shifted by up to a tenth of it, up to 6 dB louder or softer, with noise.

    What moves in at an end is silence; the noise lies 10 to 30 dB below the waveform.

    Args:
        waveform: samples and rate.
        seed: another seed, another view.
        view: number of the view.

    Example:
        >>> made = audio_view({"array": np.ones(100, dtype=np.float32), "sampling_rate": 16000})
        >>> made["array"].shape, made["sampling_rate"]
        ((100,), 16000)
    """
    samples = waveform["array"]
    draw = _generator(seed, view, samples.shape, samples.tobytes())
    most = int(_SHIFT * len(samples))
    shift = int(draw.integers(-most, most + 1))
    moved = np.zeros_like(samples)
    moved[max(shift, 0) : len(samples) + min(shift, 0)] = samples[max(-shift, 0) : len(samples) - max(shift, 0)]
    loud = moved * np.float32(10 ** (draw.uniform(-_GAIN, _GAIN) / 20))
    power = float(np.sqrt(np.mean(loud.astype(np.float64) ** 2)))
    noise = draw.standard_normal(len(samples)) * power * 10 ** (-draw.uniform(*_NOISE) / 20)
    return {"array": (loud + noise).astype(np.float32), "sampling_rate": waveform["sampling_rate"]}


def _generator(seed: int, view: int, shape: object, content: bytes) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed} {view} {shape} ".encode(), digest_size=16)
    digest.update(content)
    return np.random.default_rng(int.from_bytes(digest.digest(), "big"))


if not TYPE_CHECKING:  # else every misspelled name would pass
    __getattr__ = deprecated_names(__name__, {"sound_view": "audio_view"})
