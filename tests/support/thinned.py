"""Test cases of which only some run every time."""

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """Return cases as parameters, all but the first of each ``every`` of them for ``make test-slow``.

    Example:
        >>> [len(case.marks) for case in thinned(["a", "b", "c", "d"], 3)]
        [0, 1, 1, 0]
    """
    return [pytest.param(case, marks=[pytest.mark.slow] if index % step else []) for index, case in enumerate(cases)]
