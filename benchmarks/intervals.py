"""The 95 % interval of a mean over a few models, tasks or seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.stats import t

FEWEST = 3  # the interval of two values says nothing


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of at least three values, and the ends of its 95 % interval by Student's t distribution.

    Pass differences to compare two layers or recipes on the same models or tasks.

    Example:
        >>> [round(number, 2) for number in mean_interval([1.0, 2.0, 3.0])]
        [2.0, -0.48, 4.48]
    """
    if len(values) < FEWEST:
        raise ValueError(f"`values` must have at least {FEWEST} values, but got {len(values)}.")
    mean = fmean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def mean_cell(values: Sequence[float], form: str = ".2f") -> str:
    """Return a mean for a table, with its interval if the values differ and are enough: ``2.00 (-0.48 to 4.48)``."""
    if len(values) < FEWEST or len(set(values)) == 1:
        return f"{fmean(values):{form}}"
    mean, low, high = mean_interval(values)
    ends = form.lstrip("+")
    return f"{mean:{form}} ({low:{ends}} to {high:{ends}})"
