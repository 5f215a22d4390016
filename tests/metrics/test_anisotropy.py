from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import anisotropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows


def mean_cosine(rows: Tensor) -> Tensor:
    """Mean over all ordered pairs of different texts."""
    pairs = [cosine(a, b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    return torch.tensor(sum(pairs) / len(pairs), dtype=torch.float64)


@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5)])
def test_function_and_class_match_the_definition(texts: int, width: int) -> None:
    sample = corpus(texts=texts, width=width)
    expected = torch.stack([mean_cosine(layer) for layer in sample.pooled])
    torch.testing.assert_close(torch.stack([anisotropy(layer) for layer in sample.pooled]), expected)
    torch.testing.assert_close(value("anisotropy", sample, torch.arange(texts).split(3)), expected)


def test_known_values() -> None:
    assert anisotropy(random_rows(1, 4).expand(6, 4)) == pytest.approx(1.0)
    assert anisotropy(torch.eye(5)) == pytest.approx(0.0, abs=1e-7)
    opposite = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    assert anisotropy(opposite) == pytest.approx(-1.0)


def test_scale_of_each_row_and_rotation_do_not_matter() -> None:
    rows = random_rows(9, 4)
    transformed = rows * torch.arange(1.0, 10.0)[:, None] @ random_rotation(4)
    torch.testing.assert_close(anisotropy(transformed), anisotropy(rows))


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="two or more rows"):
        anisotropy(torch.ones(1, 3))
