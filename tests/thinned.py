"""Cases of a test of which some are enough every time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases as parameters, all but the first of each ``every`` of them for ``make test-slow``.

    Example:
        >>> [len(one.marks) for one in thinned(["a", "b", "c", "d"], 3)]
        [0, 1, 1, 0]
    """
    return [pytest.param(one, marks=[pytest.mark.slow] if place % every else []) for place, one in enumerate(cases)]
