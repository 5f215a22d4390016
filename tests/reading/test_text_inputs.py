"""Which batches of texts the plain function prepares: those that cause its warning, and those that differ."""

from typing import Any

import pytest
import torch

from midlayer_encoders.reading.batches import TextInputs
from tests.support.tiny_folders import tokenizer

LIMIT = 8


@pytest.mark.parametrize(
    ("batches", "by_plain"),
    [
        ([["abc"], ["abcdefg"], ["ab"]], [0]),
        ([["abc"], ["abcdefgh"], ["ab"]], [0, 1]),  # of just the limit, to which a longer one is truncated
        ([["abc"], ["ab"], ["ab", "abcdefghijk"], ["abcdefghijkl"]], [0, 2]),  # the first of two
        ([["abc"], [" "], ["ab"]], [0, 1]),
    ],
)
def test_first_batch_with_a_truncated_text_is_prepared_plainly(batches: list[list[str]], by_plain: list[int]) -> None:
    short = tokenizer()
    short.model_max_length = LIMIT
    read: list[int] = []

    def plain(texts: list[str]) -> dict[str, Any]:
        read.append(batches.index(texts))
        return dict(short(texts, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False))

    inputs = TextInputs(short, plain)
    for texts in batches:
        features = inputs(texts)
        expected = short(texts, padding=True, truncation=True, return_tensors="pt")["input_ids"]
        assert torch.equal(features["input_ids"], expected)
    assert inputs.trusted
    assert read == by_plain
