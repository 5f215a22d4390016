from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import LiDAR, lidar
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import entropy_of_shares, random_rotation, random_rows


def lidar_by_definition(views: Tensor, delta: float = 1e-4) -> Tensor:
    """Scatter between and within texts, the inverse square root by eigenvectors, and the entropy of the result."""
    x = views.double().numpy()
    v, n, d = x.shape
    means = [sum(x[j, i] for j in range(v)) / v for i in range(n)]
    grand = sum(means) / n
    between = sum(np.outer(mean - grand, mean - grand) for mean in means) / (n - 1)
    within = np.zeros((d, d))
    for i in range(n):
        for j in range(v):
            within += np.outer(x[j, i] - means[i], x[j, i] - means[i])
    within = within / (n * (v - 1)) + delta * np.eye(d)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    spectrum = np.clip(np.linalg.eigvalsh(root @ between @ root), 0, None)
    return torch.tensor(entropy_of_shares((spectrum / spectrum.sum()).tolist(), 1.0), dtype=torch.float64)


@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5)])
@pytest.mark.parametrize("delta", [1e-4, 0.1])
def test_function_and_class_match_the_definition(texts: int, width: int, delta: float) -> None:
    sample = corpus(texts=texts, width=width, views=4)
    expected = torch.stack([lidar_by_definition(layer, delta) for layer in sample.views])
    torch.testing.assert_close(torch.stack([lidar(layer, delta=delta) for layer in sample.views]), expected)
    batches = torch.arange(texts).split(3)
    torch.testing.assert_close(value("lidar", sample, batches, views=4, delta=delta), expected)
    torch.testing.assert_close(value("lidar", sample, views=4, delta=delta, exponential=True), expected.exp())


def test_orthogonal_texts_span_one_dimension_less_than_their_number() -> None:
    views = torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    assert lidar(views) == pytest.approx(math.log(5))
    assert lidar(views, exponential=True) == pytest.approx(5.0)


def test_noise_within_texts_hides_its_directions() -> None:
    centres = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    noise = torch.tensor([[0.0, 5.0], [0.0, -5.0]], dtype=torch.float64)
    assert lidar(centres.expand(2, 4, 2)) == pytest.approx(math.log(2))
    assert lidar(centres + noise[:, None, :]) < 0.01


def test_identical_texts_have_no_spectrum() -> None:
    assert lidar(random_rows(3, 4)[:, None, :].expand(3, 5, 4).contiguous()) == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 7), d=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_range_rotation_shift_and_order(n: int, d: int, seed: int) -> None:
    views = random_rows(3 * n, d, seed).reshape(3, n, d)
    expected = lidar(views)
    assert -1e-9 <= expected <= math.log(max(1, min(n - 1, d))) + 1e-6
    transformed = views[torch.randperm(3)][:, torch.randperm(n)] @ random_rotation(d, seed) + 3.0
    torch.testing.assert_close(lidar(transformed), expected, rtol=1e-6, atol=1e-6)


def test_scale_matters_only_through_delta() -> None:
    views = random_rows(30, 4).reshape(3, 10, 4)
    torch.testing.assert_close(lidar(10 * views, delta=1e-2), lidar(views, delta=1e-4))


@pytest.mark.parametrize("shape", [(1, 5, 3), (4, 1, 3), (5, 3)])
def test_single_view_or_text_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match=r"must be \(V, N, D\) with two or more views and texts"):
        lidar(torch.ones(shape))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OptionError, match="`delta` must be greater than 0"):
        LiDAR([0], delta=0.0)
    with pytest.raises(OptionError, match="`views` must be a whole number, 2 or more"):
        LiDAR([0], views=1)
    assert LiDAR([0]).views == 16
