"""Images and audio that the tests make up."""

from __future__ import annotations

import numpy as np
from PIL import Image

RATE = 16000


def image(seed: int, size: tuple[int, int] = (20, 24)) -> Image.Image:
    """Return a smooth image of its own."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BILINEAR)


def waveform(seed: int, length: int = 2000) -> tuple[np.ndarray, int]:
    """Return a chord of its own and its rate."""
    draw = np.random.default_rng(seed)
    time = np.arange(length) / RATE
    chord = sum(np.sin(2 * np.pi * tone * time) for tone in draw.uniform(100, 2000, 3))
    return (chord + 0.1 * draw.standard_normal(length)).astype(np.float32), RATE


IMAGES = [image(n, (20 + n, 30 - n)) for n in range(6)]
WAVEFORMS = [waveform(n, 1500 + 400 * (n % 3)) for n in range(6)]
