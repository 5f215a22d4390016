"""Values as people, and their bugs, hand them over: every one is a function of the generator alone."""

import math
from collections.abc import Callable
from datetime import date
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

__all__ = ["audio", "image", "number", "one_of", "several", "strange", "text"]

_PIECES = (
    "a", "word", " ", "\n", "\r", "\t", "\0", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\ufeff", "\u200d", "\ud83d",
    "\ude42", "🙂", "é", "e\u0301", "日本", "שלום", "🏳️‍🌈", "\ufffe", "\U0010ffff", "[PAD]", "<|endoftext|>", "{", "}", "%s", "{0}",
    '"', "'", ",", ";", "=", "\\", "/", "..", "~", "[bold]", "[/]", "-1", "007", "nan",
)  # fmt: skip
_WORDS = (
    "all",
    "paper",
    "auto",
    "none",
    "final",
    "mean",
    "cpu",
    "gpu",
    "cuda:99",
    "float32",
    "no",
    "True",
    "0",
    "text",
    "",
)


def one_of(random: Random, *makers: Callable[[Random], Any]) -> Any:
    """Return what one of these makes."""
    return random.choice(makers)(random)


def text(random: Random) -> str:
    """Return a text of a few odd pieces, seldom a very long one."""
    if random.random() < 0.02:
        return random.choice(_PIECES) * random.choice([300, 5_000, 20_000])
    return "".join(random.choices(_PIECES, k=random.choice([0, 1, 1, 2, 3, 5, 8])))


def number(random: Random) -> Any:
    """Return a number of any type: whole or not, finite or not, small or beyond every register."""
    complete = random.choice([0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, -(2**63), 2**64, 10**400, random.randint(-9, 9)])
    real = random.choice([0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan, random.random()])
    small = random.randint(-3, 3)
    return random.choice(
        [complete, real, True, False, np.int64(small), np.uint8(abs(small)), np.float32(real if abs(real) < 1e30 else 0.5),
         np.float64(real), np.bool_(True), Fraction(1, 3), 1 + 2j, torch.tensor(small), torch.tensor(0.5), np.array(small)]
    )  # fmt: skip


def image(random: Random) -> Any:
    """Return an image in one of the forms that are taken, or nearly one."""
    from PIL import Image

    shape = random.choice([(4, 5), (4, 5, 3), (3, 4, 5), (4, 5, 4), (4, 5, 2), (0, 3, 3), (4, 5, 3, 1), (1, 1, 3)])
    kind = random.choice(["uint8", "float32", "float64", "int16", "bool", "complex64"])
    array = np.full(shape, random.choice([0, 1, 1, 200, -1, np.nan] if kind.startswith("float") else [0, 1])).astype(
        kind
    )
    result = [array, torch.zeros(3, 4, 5), torch.zeros(3, 4, 5, dtype=torch.bfloat16)]
    result += [
        Image.new(mode, (5, 4)) for mode in ("RGB", "L", "1", "P", "RGBA", "CMYK", "I", "F", "LA", "HSV", "I;16")
    ]
    return random.choice(result)


def audio(random: Random) -> Any:
    """Return a waveform in one of the forms that are taken, or nearly one."""
    length = random.choice([0, 1, 100, 1600, 1600])
    values = random.choice([0.0, 0.5, math.nan, math.inf])
    array = random.choice(
        [np.full(length, values, np.float32), np.full((2, length), values), np.ones(length, np.int16),
         np.ones(length, np.uint8), torch.full((length,), values), np.ones(length, bool), [values] * length,
         np.ones((length, 3, 2)), np.ones(length, np.complex64), np.array(["a"] * length)]
    )  # fmt: skip
    rate = random.choice([16000, 16000, 8000, 16000.0, 0, -1, None, "16000", np.int64(16000), True, math.nan])
    return random.choice([(array, rate), {"array": array, "sampling_rate": rate}, array, {"array": array}, (array,)])


def several(random: Random, make: Callable[[Random], Any] | None = None) -> list[Any]:
    """Return a short list of what ``make`` makes; of anything without it."""
    return [(make or strange)(random) for _ in range(random.choice([0, 1, 2, 3, 5]))]


def strange(random: Random, depth: int = 2) -> Any:
    """Return a value of any type."""
    plain: list[Callable[[Random], Any]] = [
        text, text, number, number, lambda r: r.choice(_WORDS), lambda _: None, lambda r: text(r).encode("utf8", "replace"),
        lambda _: object(), lambda _: Path("nowhere"), lambda _: date(2026, 1, 1), lambda _: ..., lambda _: print, lambda _: ValueError,
        lambda _: torch.float32, lambda _: torch.device("cpu"), lambda _: np.array(["a", "b"]), lambda _: np.arange(3),
        lambda _: torch.zeros(2), image, audio, lambda _: iter("ab"), lambda _: range(3),
    ]  # fmt: skip
    if depth and random.random() < 0.35:
        parts = [strange(random, depth - 1) for _ in range(random.choice([0, 1, 1, 2, 3]))]
        keys = [text(random) for _ in parts]
        result = random.choice([list, tuple, lambda p: dict(zip(keys, p, strict=True)), lambda p: {str(x) for x in p}])
        return result(parts)  # type: ignore[operator]
    return one_of(random, *plain)
