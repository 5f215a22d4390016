"""Synthetic images and audio for tests."""

import numpy as np
from PIL import Image

RATE = 16000


def image(seed: int, size: tuple[int, int] = (20, 24)) -> Image.Image:
    """Return a smooth image that depends on the seed."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BILINEAR)


def waveform(seed: int, length: int = 2000) -> tuple[np.ndarray, int]:
    """Return a chord that depends on the seed, and its rate."""
    rng = np.random.default_rng(seed)
    time = np.arange(length) / RATE
    chord = sum(np.sin(2 * np.pi * tone * time) for tone in rng.uniform(100, 2000, 3))
    return (chord + 0.1 * rng.standard_normal(length)).astype(np.float32), RATE


IMAGES = [image(n, (20 + n, 30 - n)) for n in range(6)]
WAVEFORMS = [waveform(n, 1500 + 400 * (n % 3)) for n in range(6)]
