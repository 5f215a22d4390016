"""Centering, compared with its definition."""

import pytest
import torch

from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import centering_offset


def drawn(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.linspace(0.1, 3, width, dtype=torch.float64)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64) * scales + 5


def test_centered_vectors_have_zero_mean_and_others_are_shifted_equally() -> None:
    sample, remaining = drawn(40, 6), drawn(7, 6)
    torch.testing.assert_close(remaining + centering_offset(sample), remaining - sample.mean(0))


def test_zeros_of_texts_without_tokens_do_not_change_the_mean() -> None:
    spans = drawn(40, 6).reshape(20, 2, 6)
    with_zero = torch.cat([spans, torch.stack([torch.zeros(6), spans[:, 1].mean(0)])[None]])
    torch.testing.assert_close(centering_offset(with_zero), -spans.mean(0))


def test_mean_of_too_few_texts_is_refused() -> None:
    with pytest.raises(OptionError, match="`center` must hold 16 texts or more, but got 15"):
        centering_offset(drawn(15, 4))
