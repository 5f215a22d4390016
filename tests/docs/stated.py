"""Numbers that pages state, compared with what committed frames give.

A claim is a few words of a page with ``{}`` where each number stands, and the numbers. The words are looked for in the page (spaces
and line breaks are alike), and every number must be the frames' to as many digits as the page prints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WORDS = dict(
    zip(
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        range(1, 13),
        strict=True,
    )
)
_NUMBER = r"([+\-−]?(?:\d[\d,]*)?\.?\d+|" + "|".join(_WORDS) + ")"


@dataclass(frozen=True)
class Claim:
    """What a page says: its words with ``{}`` for each number, and what the numbers are."""

    page: str
    words: str
    numbers: Callable[[], Sequence[float]]

    def __str__(self) -> str:
        return f"{self.page}: {self.words[:60]}"


def wrong(claim: Claim, root: Path = ROOT) -> list[str]:
    """Return a sentence for each number that is not what the frames give, and for words that the page lacks."""
    text = (root / claim.page).read_text(encoding="utf8")
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in claim.words.split("{}")]
    found = list(re.finditer(_NUMBER.join(parts), text))
    if not found:
        return [f"{claim.page} does not say {claim.words!r}: mend the page, or change the claim in {_place(claim)}."]
    expected = [float(number) for number in claim.numbers()]
    said = []
    for match in found:
        stated = match.groups()
        assert len(stated) == len(expected), (
            f"{len(stated)} numbers in {claim.words!r}, {len(expected)} from the frames"
        )
        for place, (word, number) in enumerate(zip(stated, expected, strict=True), 1):
            if not _is(word, number):
                line = text.count("\n", 0, match.start(place)) + 1
                said.append(f"{claim.page}:{line} says {word} in {claim.words!r}, but the frames give {number:.5g}.")
    return said


def _is(word: str, number: float) -> bool:
    """Return whether a number as it is printed is this one, rounded."""
    if word in _WORDS:
        return number == _WORDS[word]
    plain = word.replace(",", "").replace("−", "-")
    digits = len(plain.partition(".")[2])
    return abs(float(plain) - number) <= 0.5 * 10**-digits + 1e-9


def _place(claim: Claim) -> str:
    code = claim.numbers.__code__
    return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno}"
