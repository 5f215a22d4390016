from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import LogdetEntropy, logdet_entropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import random_rotation, random_rows


def rate_by_definition(rows: Tensor, epsilon: float) -> Tensor:
    """Half the log determinant of I + D / (N eps^2) Z Z'."""
    n, d = rows.shape
    return 0.5 * torch.logdet(torch.eye(n, dtype=torch.float64) + d / (n * epsilon**2) * rows @ rows.T)


@pytest.mark.parametrize("epsilon", [0.5, 1.0])
@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5)])
def test_function_and_class_match_the_definition(texts: int, width: int, epsilon: float) -> None:
    sample = corpus(texts=texts, width=width)
    unit = sample.pooled / sample.pooled.norm(dim=-1, keepdim=True)
    expected = torch.stack([rate_by_definition(layer, epsilon) for layer in unit])
    torch.testing.assert_close(torch.stack([logdet_entropy(r, epsilon=epsilon) for r in sample.pooled]), expected)
    torch.testing.assert_close(value("logdet_entropy", sample, torch.arange(texts).split(3), epsilon=epsilon), expected)
    raw = torch.stack([rate_by_definition(layer, epsilon) for layer in sample.pooled])
    torch.testing.assert_close(value("logdet_entropy", sample, epsilon=epsilon, unit=False), raw)
    centered = torch.stack([rate_by_definition(layer - layer.mean(dim=0), epsilon) for layer in unit])
    torch.testing.assert_close(value("logdet_entropy", sample, epsilon=epsilon, center=True), centered)


def test_known_values() -> None:
    assert logdet_entropy(torch.zeros(4, 3)) == 0.0
    orthogonal = logdet_entropy(torch.eye(6, dtype=torch.float64))  # the maximum for unit rows
    assert orthogonal == pytest.approx(6 / 2 * math.log(1 + 6 / (6 * 0.25)))
    assert logdet_entropy(random_rows(6, 6)) < orthogonal
    same = random_rows(1, 6).expand(6, 6)
    assert logdet_entropy(same) == pytest.approx(0.5 * math.log(1 + 6 / 0.25))


def test_rotation_does_not_matter_and_scale_only_when_raw() -> None:
    rows = random_rows(9, 4)
    torch.testing.assert_close(logdet_entropy(3 * rows @ random_rotation(4)), logdet_entropy(rows))
    torch.testing.assert_close(logdet_entropy(3 * rows, unit=False, epsilon=1.5), logdet_entropy(rows, unit=False))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OptionError, match="`epsilon` must be greater than 0"):
        LogdetEntropy([0], epsilon=0.0)
