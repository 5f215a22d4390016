from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import AlphaReQ, TooFewTextsError, alpha_req
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import random_rotation, random_rows, spectrum


def slope_by_definition(rows: Tensor, first: int, last: int, weighted: bool) -> Tensor:
    """Weighted least squares of log eigenvalue on minus log rank, rank 1 being the largest."""
    values = [v for v in spectrum(rows - rows.mean(dim=0)) if v > 1e-12]
    ranks = range(first, min(last, len(values)) + 1)
    root = np.array([(1 / rank if weighted else 1.0) ** 0.5 for rank in ranks])
    design = np.array([[-np.log(rank), 1.0] for rank in ranks]) * root[:, None]
    target = np.array([np.log(values[rank - 1]) for rank in ranks]) * root
    slope, *_ = np.linalg.lstsq(design, target, rcond=None)
    return torch.tensor(slope[0], dtype=torch.float64)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("first", "last"), [(1, 100), (2, 4), (3, 100)])
@pytest.mark.parametrize(("texts", "width"), [(7, 9), (13, 5)])
def test_function_and_class_match_the_definition(texts: int, width: int, first: int, last: int, weighted: bool) -> None:
    sample = corpus(texts=texts, width=width)
    options = {"first": first, "last": last, "weighted": weighted}
    expected = torch.stack([slope_by_definition(layer, **options) for layer in sample.pooled])
    torch.testing.assert_close(torch.stack([alpha_req(layer, **options) for layer in sample.pooled]), expected)
    torch.testing.assert_close(value("alpha_req", sample, torch.arange(texts).split(3), **options), expected)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_power_law_gives_its_exponent(exponent: float) -> None:
    ranks = torch.arange(1, 41, dtype=torch.float64)
    rows = random_rotation(40) @ torch.diag(ranks ** (-exponent / 2)) @ random_rotation(40, 1)
    assert float(alpha_req(rows, center=False)) == pytest.approx(exponent, abs=1e-9)


def test_scale_shift_and_rotation_do_not_matter() -> None:
    rows = random_rows(12, 6)
    torch.testing.assert_close(alpha_req(3 * rows @ random_rotation(6) + 5), alpha_req(rows))


def test_too_short_spectrum_is_refused() -> None:
    with pytest.raises(TooFewTextsError, match="Eigenvalues above rounding from rank 3 to 100 must be at least 2"):
        alpha_req(random_rows(4, 9))
    with pytest.raises(TooFewTextsError, match="must be at least 2, but there are 0"):
        alpha_req(torch.ones(9, 9))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OptionError, match="1 <= first < last, but got 5 and 5"):
        AlphaReQ([0], first=5, last=5)
