"""The warning of texts that take most of the time: which texts it names, and with which numbers."""

from types import SimpleNamespace
from typing import Any

import pytest

from midlayer_encoders.reading import batches
from midlayer_encoders.reading.batches import warn_of_long_texts


@pytest.mark.parametrize(
    ("counts", "median", "named"),
    [
        ([10, 512, 10], 10, "2 (512 tokens)"),  # just as many as are long
        ([10, 511, 10], 10, None),
        ([52, 520, 52], 52, "2 (520 tokens)"),  # just ten times the median
        ([52, 519, 52], 52, None),
        ([1200, *[9] * 9, 700], 9, "1 (1,200 tokens), 11 (700 tokens)"),
        ([*[9] * 6, *[600] * 5], 9, ", ".join(f"{number} (600 tokens)" for number in range(7, 12))),
        ([*[9] * 7, *[600] * 6], 9, ", ".join(f"{number} (600 tokens)" for number in range(8, 13)) + ", …"),
    ],
)
def test_texts_that_are_long_are_named_with_their_tokens(
    counts: list[int], median: int, named: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "count_tokens", lambda _, texts: [counts[int(text)] for text in texts])
    source: Any = SimpleNamespace()
    texts = [str(number) for number in range(len(counts))]
    warn_of_long_texts(source, texts, texts)
    expected = (
        f"Much longer than the others ({median} tokens, the median), and slow: text {named} of {len(counts)}. "
        "`max_length=512` (--max-length) truncates."
    )
    assert caplog.messages == ([expected] if named else [])
