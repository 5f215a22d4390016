"""Centering, whitening and filtering, compared with their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf

from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import middle_directions, vector_map


def drawn(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.linspace(0.1, 3, width, dtype=torch.float64)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64) * scales + 5


def test_centered_vectors_have_zero_mean_and_others_are_shifted_equally() -> None:
    sample, remaining = drawn(40, 6), drawn(7, 6)
    matrix, offset = vector_map(sample, width=6)
    torch.testing.assert_close(remaining @ matrix.T + offset, remaining - sample.mean(0))


def test_whitened_vectors_have_the_shrunk_covariance_of_equal_scales() -> None:
    sample = drawn(400, 8)
    matrix, offset = vector_map(sample, width=8, whiten=True)
    shrunk = torch.from_numpy(LedoitWolf().fit(sample.numpy()).covariance_)
    actual = matrix @ shrunk @ matrix.T
    torch.testing.assert_close(actual, torch.eye(8, dtype=torch.float64) * actual[0, 0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(actual[0, 0], torch.linalg.eigvalsh(shrunk).mean(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(
        (sample @ matrix.T + offset).mean(0), torch.zeros(8, dtype=torch.float64), atol=1e-9, rtol=0
    )
    few, _ = vector_map(drawn(16, 64), width=64, whiten=True)  # fewer texts than dimensions
    assert torch.linalg.cond(few) < 100


def test_filter_keeps_the_middle_singular_directions() -> None:
    embeddings = drawn(300, 100)
    projection = middle_directions(embeddings)
    _, _, directions = np.linalg.svd(embeddings.numpy(), full_matrices=False)
    saved = directions[2:75]  # all but the first two of a hundred and the last quarter
    np.testing.assert_allclose(projection.numpy(), saved.T @ saved, atol=1e-8)
    matrix, offset = vector_map(None, width=100, projection=projection)
    torch.testing.assert_close(matrix, projection)
    assert not offset.any()
    sample = drawn(50, 100)
    combined, shift = vector_map(sample, width=100, projection=projection)
    torch.testing.assert_close(
        sample @ combined.T + shift, (sample - sample.mean(0)) @ projection, atol=1e-8, rtol=1e-8
    )


def test_mean_of_too_few_texts_is_refused() -> None:
    with pytest.raises(OptionError, match="`center` must hold 16 texts or more, but got 15"):
        vector_map(drawn(15, 4), width=4)
