from __future__ import annotations

from typing import Any

import pytest
from midlayer_encoders.callbacks._settings import make_cadence

from midlayer_encoders.errors import OptionError


@pytest.mark.parametrize(
    ("every", "due"), [("log2", [0, 1, 2, 4, 8]), (3, [0, 3, 6, 9]), ([2, 5], [2, 5]), ((0, 7), [0, 7])]
)
def test_due_steps(every: Any, due: list[int]) -> None:
    assert [step for step in range(11) if make_cadence(every).due(step)] == due


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (0, "must be 1 or more, but got 0"),
        (-3, "must be 1 or more"),
        ("log", "a list of steps or 'log2', but got 'log'"),
        (2.5, "a number of steps"),
        (True, "a number of steps"),
        ([], "must hold steps"),
        ([1, -1], "must hold steps"),
    ],
)
def test_a_wrong_cadence_is_refused(every: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        make_cadence(every)
