from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import Anisotropy, anisotropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows, spectrum


def mean_cosine(rows: Tensor) -> Tensor:
    """Mean over all ordered pairs of different texts."""
    pairs = [cosine(a, b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    return torch.tensor(sum(pairs) / len(pairs), dtype=torch.float64)


def first_share(rows: Tensor) -> Tensor:
    """The largest eigenvalue of the covariance over their sum."""
    values = spectrum(rows - rows.mean(dim=0))
    return torch.tensor(max(values) / sum(values), dtype=torch.float64)


@pytest.mark.parametrize(("form", "oracle"), [("cosine", mean_cosine), ("spectral", first_share)])
@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5)])
def test_function_and_class_match_the_definition(form, oracle, texts: int, width: int) -> None:  # type: ignore[no-untyped-def]
    sample = corpus(texts=texts, width=width)
    expected = torch.stack([oracle(layer) for layer in sample.pooled])
    torch.testing.assert_close(torch.stack([anisotropy(layer, form=form) for layer in sample.pooled]), expected)
    torch.testing.assert_close(value("anisotropy", sample, torch.arange(texts).split(3), form=form), expected)


def test_known_values() -> None:
    assert anisotropy(random_rows(1, 4).expand(6, 4)) == pytest.approx(1.0)
    assert anisotropy(torch.eye(5)) == pytest.approx(0.0, abs=1e-7)
    opposite = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    assert anisotropy(opposite) == pytest.approx(-1.0)
    assert anisotropy(opposite, form="spectral") == pytest.approx(1.0)
    cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert anisotropy(cross, form="spectral") == pytest.approx(0.5)
    assert anisotropy(0.1 * torch.ones(5, 3), form="spectral") == 0.0


def test_scale_of_each_row_and_rotation_do_not_matter() -> None:
    rows = random_rows(9, 4)
    transformed = rows * torch.arange(1.0, 10.0)[:, None] @ random_rotation(4)
    torch.testing.assert_close(anisotropy(transformed), anisotropy(rows))


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="two or more rows"):
        anisotropy(torch.ones(1, 3))
    with pytest.raises(OptionError, match="Did you mean 'cosine'"):
        Anisotropy([0], form="cosin")  # type: ignore[arg-type]
