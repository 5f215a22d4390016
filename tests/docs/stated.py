"""Numbers that pages state, compared with what committed frames give.

A claim, in ``claims/``, is a few words of a page with ``{}`` where each number stands, and the numbers. The words are looked
for in the page (spaces and line breaks are alike), and every number must be the frames' to as many digits as the page prints.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
    """What a page says: its words with ``{}`` for each number, what the numbers are, and where that is declared."""

    page: str
    words: str
    numbers: Callable[[], Any]
    place: str = "here"

    def __str__(self) -> str:
        return f"{self.page}: {self.words[:60]}"


def read_claims(path: Path, names: Mapping[str, Any]) -> Iterator[Claim]:
    """Yield the claims of a file: the path of a page, then for each claim a line of words and an indented line of numbers.

    The numbers are expressions over ``names``, which give cells of the committed frames; lists of them are flattened.
    """
    page = words = ""
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        if line.startswith(" "):
            yield Claim(page, words, partial(eval, line.strip(), dict(names)), f"{path.name}:{number}")
        elif re.fullmatch(r"\S+\.md", line):
            page = line
        elif line:
            words = line


def flatten(numbers: Any) -> list[float]:
    """Return the numbers of nested lists."""
    return [x for item in numbers for x in flatten(item)] if isinstance(numbers, Iterable) else [float(numbers)]


def wrong(claim: Claim, root: Path = ROOT) -> list[str]:
    """Return a sentence for each number that is not what the frames give, and for words that the page lacks."""
    text = (root / claim.page).read_text(encoding="utf8")
    parts = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in claim.words.split("{}")]
    found = list(re.finditer(_NUMBER.join(parts), text))
    if not found:
        return [f"{claim.page} does not say {claim.words!r}: mend the page, or change the claim in {claim.place}."]
    expected = flatten(claim.numbers())
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
