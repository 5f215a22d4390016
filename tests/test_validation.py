import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from midlayer_encoders.errors import OptionError, error_summary, short_repr
from midlayer_encoders.validation import (
    check_choice,
    check_count,
    check_effect,
    check_flag,
    check_list,
    check_number,
    check_path,
    check_progress,
    check_seed,
    check_text,
    check_texts,
)

ROWS = [{"label": 1, "Text": "a"}, {"label": 2, "Text": "b"}]
TABLES = [pd.DataFrame(ROWS), pl.DataFrame(ROWS), datasets.Dataset.from_list(ROWS), pa.Table.from_pylist(ROWS)]

ACCEPTED: list[tuple[Callable[..., Any], Any, Any]] = [
    (check_count, np.int64(3), 3),
    (check_count, torch.tensor(3), 3),
    (check_seed, np.uint8(0), 0),
    (check_seed, 2**32 - 1, 2**32 - 1),
    (check_number, Fraction(1, 2), 0.5),
    (check_number, np.float32(0.5), 0.5),
    (check_number, 3, 3.0),
    (check_flag, np.bool_(False), False),
    (check_texts, np.array(["a", "b"]), ["a", "b"]),
    (check_texts, (text for text in "ab"), ["a", "b"]),
    (check_list, range(2), [0, 1]),
    *((check_list, table, ["a", "b"]) for table in TABLES),
    (check_list, pd.DataFrame({"review": ["a", "b"]}), ["a", "b"]),
]
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (check_count, (True, 0, -1, 1.0, "1", None, math.nan, math.inf, 2**63, np.bool_(True), torch.zeros(2), [1])),
    (check_seed, (-1, 2**32, "a", 0.5, None, True)),
    (check_number, (math.nan, math.inf, -math.inf, -0.5, "1", None, True, 1j, 10**400, np.float64("nan"))),
    (check_flag, ("no", 0, 1, None, "True")),
    (check_text, (None, 3, b"a", "\ud83d", ["a"])),
    (check_texts, ("one text", None, 3, b"a", {"a": 1}, {"a"}, ["a", None], [], np.array(3), torch.tensor(1))),
    (check_path, (3, b"a", "", "\0", "\ud83d", ["a"])),
]


@pytest.mark.parametrize(("check", "value", "expected"), ACCEPTED)
def test_numbers_of_other_libraries_become_plain_ones(check: Callable[..., Any], value: Any, expected: Any) -> None:
    result = check(value) if check is check_seed else check("x", value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(("check", "values"), REFUSED)
def test_invalid_arguments_are_refused_by_name(check: Callable[..., Any], values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(OptionError, match=r"^`(x|seed)(\[\d\])?` must"):
            check(value) if check is check_seed else check("x", value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_texts("x", []), "`x` must hold at least one text, but got none."),
        (lambda: check_texts("x", ["a"], minimum=3), "`x` must hold 3 texts or more, but got 1."),
        (
            lambda: check_list("x", pd.DataFrame({"title": ["a"], "body": ["b"]})),
            "`x` must be texts, but got a table with title, body: pass the column of the texts.",
        ),
        (
            lambda: check_list("x", __file__),
            f"`x` must be a list of texts, but got one: {short_repr(__file__)}. "
            f"Write open({__file__!r}).read().splitlines().",
        ),
        (lambda: check_list("x", [], "rows"), "`x` must hold at least one row, but got none."),
        (lambda: check_number("x", -1), "`x` must be a finite number, 0 or more, but got -1."),
        (lambda: check_number("x", 2, maximum=0.5), "`x` must be a finite number, from 0 to 0.5, but got 2."),
        (lambda: check_count("x", 1, minimum=2), "`x` must be a whole number, 2 or more, but got 1."),
    ],
)
def test_message_states_the_limits_and_the_value(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_tokens_of_the_environment_are_not_in_error_summaries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, " s3cr ")
    assert error_summary(ValueError("header s3cr")) == "ValueError: header hf_…"


def test_choice_may_be_compared_with_any_object() -> None:
    for value in (np.zeros(3), torch.zeros(3), None, ["a"], 10**5000):
        with pytest.raises(OptionError, match="`x` must be one of 'a', 'b', but got"):
            check_choice("x", value, ("a", "b"))


def test_progress_must_be_callable() -> None:
    check_progress(None)
    check_progress(print)
    with pytest.raises(OptionError, match="`progress` must be a function"):
        check_progress("bar")


def test_argument_without_effect_must_have_its_default() -> None:
    def function(*, size: int = 20, name: str | None = None) -> None: ...

    check_effect(function, "here", size=20, name=None)
    for kwargs in ({"size": 21}, {"size": 20.0}, {"size": np.zeros(2)}, {"name": "a"}):
        with pytest.raises(OptionError, match=r"` has no effect here, but got"):
            check_effect(function, "here", **kwargs)


def test_repr_of_any_object_is_short() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    assert short_repr(Odd()) == "a Odd"
    assert short_repr(np.zeros((2, 3))) == "a ndarray of shape (2, 3)"
    assert len(short_repr("a" * 10**6)) == 60
