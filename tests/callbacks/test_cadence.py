from typing import Any

import pytest
from midlayer_encoders.callbacks._settings import CallbackSettings, is_due

from midlayer_encoders.errors import OptionError


@pytest.mark.parametrize(
    ("cadence", "due"), [("log2", [0, 8, 16, 32]), (9, [0, 9, 18, 27, 36]), ([2, 5], [2, 5]), ((0, 7), [0, 7])]
)
def test_due_steps(cadence: Any, due: list[int]) -> None:
    assert [step for step in range(40) if is_due(cadence, step)] == due


@pytest.mark.parametrize(
    ("cadence", "message"),
    [
        (0, "1 or more, .*but got 0"),
        (-3, "1 or more, .*but got -3"),
        ("log", "a list of steps of 0 or more, or 'log2', but got 'log'"),
        (2.5, "but got 2.5"),
        (True, "but got True"),
        (None, "but got None"),
        ([], r"but got \[\]"),
        ([1, -1], r"but got \[1, -1\]"),
    ],
)
def test_invalid_cadence_is_refused(cadence: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CallbackSettings(["a text"], every_n_steps=cadence)
