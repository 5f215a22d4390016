from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import IntrinsicDimension, TooFewTextsError, intrinsic_dimension
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import random_rotation, random_rows


def log_ratios_by_definition(rows: Tensor) -> list[float]:
    """Logarithms of second over first neighbor distance, ascending."""
    logs = []
    for i, row in enumerate(rows):
        first, second = sorted(float((row - other_item).norm()) for j, other_item in enumerate(rows) if j != i)[:2]
        logs.append(math.log(second / first))
    return sorted(logs)


def fit_by_definition(rows: Tensor, discard: float) -> float:
    """Slope through the origin of -log(1 - F) over log mu, excluding the largest ratios."""
    logs = log_ratios_by_definition(rows)
    saved = logs[: min(int(len(logs) * (1 - discard)), len(logs) - 1)]
    heights = [-math.log(1 - i / len(logs)) for i in range(1, len(saved) + 1)]
    slope, *_ = np.linalg.lstsq(np.array(saved)[:, None], np.array(heights), rcond=None)
    return float(slope[0])


@pytest.mark.parametrize("discard", [0.0, 0.1, 0.3])
def test_fit_matches_the_definition(discard: float) -> None:
    texts = corpus(texts=40)
    expected = torch.tensor([fit_by_definition(layer, discard) for layer in texts.pooled], dtype=torch.float64)
    values = torch.stack([intrinsic_dimension(layer, discard=discard) for layer in texts.pooled])
    torch.testing.assert_close(values, expected)
    batches = torch.arange(40).split(7)
    torch.testing.assert_close(value("intrinsic_dimension", texts, batches, discard=discard), expected)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_flat_cloud_has_its_own_dimension_in_any_space(dimension: int) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.rand(1500, dimension, generator=generator, dtype=torch.float64)
    cloud = flat @ random_rotation(12)[:dimension] + 100.0
    assert float(intrinsic_dimension(cloud)) == pytest.approx(dimension, rel=0.15)


@pytest.mark.parametrize("width", [6, 40])
def test_matches_scikit_dimension(width: int) -> None:
    skdim = pytest.importorskip("skdim", reason="scikit-dimension is a test-only dependency")
    rows = random_rows(200, width)
    reference = skdim.id.TwoNN(discard_fraction=0.1, method="linear").fit(rows.numpy()).dimension_
    assert float(intrinsic_dimension(rows)) == pytest.approx(reference, rel=1e-6)


def test_repeated_row_counts_once() -> None:
    rows = random_rows(30, 4)
    torch.testing.assert_close(intrinsic_dimension(torch.cat([rows, rows[:7]])), intrinsic_dimension(rows))


def test_near_neighbors_far_from_the_origin_are_distinguished() -> None:
    rows = random_rows(50, 3)
    torch.testing.assert_close(intrinsic_dimension(1e-3 * rows + 1e4), intrinsic_dimension(rows), rtol=1e-4, atol=1e-4)


def test_too_few_distinct_rows_are_refused() -> None:
    with pytest.raises(TooFewTextsError, match="Different rows of `embeddings` must be at least 3, but there are 2"):
        intrinsic_dimension(torch.tensor([[1.0], [1.0], [2.0]]))
    with pytest.raises(TooFewTextsError, match="two nearest neighbors differ"):
        intrinsic_dimension(torch.eye(6))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OptionError, match=r"`discard` must be in \[0, 1\)"):
        IntrinsicDimension([0], discard=1.0)
