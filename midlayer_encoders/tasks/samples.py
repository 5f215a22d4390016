"""Choose the rows of a sample.

The sample depends on the rows' numbers, labels and ids only, so every process draws the same one, and a sample contains
every smaller one.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from midlayer_encoders._types import content_digest

#: Rows below which scores have no interval.
SMALLEST_LIMIT = 10

_BINS = 10  # of equal size, for scores
_FEWEST_STRATA = 3  # in every sample: with one label there is no score, and mteb scores two labels in another way


def whole_name(name: str) -> str:
    """Return a task's name without its limit.

    Example:
        >>> whole_name("Banking77Classification[500]"), whole_name("STS12")
        ('Banking77Classification', 'STS12')
    """
    return re.sub(r"\[\d+\]$", "", name)


def sample_order(strata: Sequence[str]) -> list[int]:
    """Return all rows in an order whose every beginning has each stratum in proportion, to within a row or two.

    The order begins with a row of each of the three largest strata.

    Args:
        strata: the stratum of each row.

    Example:
        >>> order = sample_order(["a"] * 60 + ["b"] * 30 + ["c"] * 10)
        >>> Counter("aaaaaabbbc"[row // 10] for row in order[:10])
        Counter({'a': 6, 'b': 3, 'c': 1})
    """
    members: dict[str, list[int]] = defaultdict(list)
    for row, stratum in enumerate(strata):
        members[stratum].append(row)
    places: list[tuple[float, str, int]] = []
    for stratum, rows in members.items():
        # A start by chance: otherwise all strata of the same size would come at once.
        start = int(_rank(stratum), 16) / 2**64
        ranked = sorted((_rank(row), row) for row in rows)
        places += [((start + number) / len(rows), rank, row) for number, (rank, row) in enumerate(ranked)]
    order = [row for _, _, row in sorted(places)]
    largest = sorted(members, key=lambda stratum: (-len(members[stratum]), stratum))[:_FEWEST_STRATA]
    first = [next(row for row in order if strata[row] == stratum) for stratum in largest]
    return list(dict.fromkeys([*first, *order]))


def training_order(labels: Sequence[Sequence[str]], per_label: int) -> tuple[list[int], int]:
    """Return all rows with ``per_label`` rows of each label first, and the number of these.

    Args:
        labels: the labels of each row, one or several.
        per_label: rows of a label on which a classifier is trained.
    """
    order = sample_order([" ".join(sorted(row)) for row in labels])
    counts = Counter[str]()
    first: list[int] = []
    for row in order:
        if any(counts[label] < per_label for label in labels[row]):
            first.append(row)
            counts.update(labels[row])
    return list(dict.fromkeys([*first, *order])), len(first)


def score_bins(scores: Sequence[float]) -> list[str]:
    """Return the bin of each score, of ten with equal numbers of rows; equal scores share a bin.

    Example:
        >>> score_bins([0.0, 0.0, 1.5, 2.5, 5.0])
        ['0', '0', '4', '6', '8']
    """
    ordered = sorted(scores)
    return [str(_BINS * bisect_left(ordered, score) // len(scores)) for score in scores]


def sampled_ids(ids: Iterable[str], count: int) -> set[str]:
    """Return the first ids in a fixed random order."""
    return set(sorted(ids, key=_rank)[:count])


def _rank(item: int | str) -> str:
    """Return the place of a row, a stratum or an id in a fixed random order."""
    return content_digest(f"{type(item).__name__} {item}", 8)
