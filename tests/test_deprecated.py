"""Deprecated keywords are mapped to their replacements, and unknown ones are refused."""

from __future__ import annotations

from typing import Any

import pytest

from midlayer_encoders.errors import take_deprecated

REPLACEMENTS = {"texts": "metric_texts", "epochs": "training.epochs", "batch_size": "training.batch_size"}


def test_old_keywords_are_returned_under_their_new_names() -> None:
    keywords: dict[str, Any] = {"epochs": 3, "texts": 8, "batch_size": 64, "norm": "none"}
    with pytest.warns(DeprecationWarning, match="is now") as warned:
        values = take_deprecated(keywords, REPLACEMENTS)
    assert values == {"metric_texts": 8, "training": {"epochs": 3, "batch_size": 64}}
    assert keywords == {"norm": "none"}
    assert {warning.filename for warning in warned} == {__file__}


def test_without_old_keywords_nothing_is_returned_or_warned() -> None:
    assert take_deprecated({}, REPLACEMENTS, function="probe") == {}


def test_unknown_keyword_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match=r"probe\(\) got an unexpected keyword .*'epoch'\. Did you mean 'epochs'"):
        take_deprecated({"epoch": 3}, REPLACEMENTS, function="probe")
