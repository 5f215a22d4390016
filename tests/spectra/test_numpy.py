"""Spectra beside numpy's: sizes, dtypes, missing rank, zeros, and how a batch is shared out."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from midlayer_encoders.metrics import eigen as spectra
from midlayer_encoders.metrics.eigen import eigenvalues, spectral_entropy

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ORDERS = (0.5, 1.0, 1.5, 2.0, 4.0, math.inf)


def matrices_of(n: int, rank: int, dtype: torch.dtype, *, count: int = 3) -> Tensor:
    """Return Gram matrices of a rank, exactly symmetric in the dtype."""
    rng = np.random.default_rng(10 * n + rank)
    rows = torch.from_numpy(rng.integers(-3, 4, size=(count, n, rank)).astype(float))
    return (rows @ rows.mT / 8).to(dtype)  # whole eighths: no rounding in float64 and float32


def numpy_values(matrix: Tensor, size: int) -> np.ndarray:
    """Return the eigenvalues in numpy's float64, largest first, none below zero, zeros beyond the corner."""
    corner = matrix[:size, :size].double().numpy()
    actual = np.sort(np.linalg.eigvalsh(corner))[::-1] if size else np.zeros(0)
    return np.concatenate([np.clip(actual, 0, None), np.zeros(len(matrix) - size)])


def entropy(values: np.ndarray, alpha: float) -> float:
    total = values.sum()
    if total == 0:
        return 0.0
    p = values[values > 1e-13 * total] / total
    if alpha == 1:
        return float(-(p * np.log(p)).sum())
    return float(-np.log(p.max()) if math.isinf(alpha) else np.log((p**alpha).sum()) / (1 - alpha))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "rank"), [(1, 1), (2, 1), (7, 3), (16, 16), (40, 5), (70, 70)])
def test_eigenvalues_match_numpy_for_the_same_matrix(n: int, rank: int, dtype: torch.dtype) -> None:
    """The numbers of a half-precision matrix are read as they are: only the matrix was rounded, not its spectrum."""
    matrices = matrices_of(n, rank, dtype)
    sizes = torch.tensor([n, max(n - 2, 0), n // 2])
    for inputs, counts in ((None, [n] * 3), (sizes, sizes.tolist())):
        actual = eigenvalues(matrices, inputs)
        expected = np.stack([numpy_values(matrix, size) for matrix, size in zip(matrices, counts, strict=True)])
        assert actual.dtype == torch.float64
        trace = np.maximum(expected.sum(axis=1, keepdims=True), 1e-300)
        np.testing.assert_allclose(actual.numpy() / trace, expected / trace, rtol=0, atol=1e-13)


@pytest.mark.parametrize("alpha", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_entropies_of_full_and_missing_rank(alpha: float, dtype: torch.dtype) -> None:
    for n, rank in ((5, 5), (24, 2), (33, 33)):
        matrices = matrices_of(n, rank, dtype)
        sizes = torch.tensor([n, n - 1, 2])
        for inputs, counts in ((None, [n] * 3), (sizes, sizes.tolist())):
            expected = [
                entropy(numpy_values(matrix, size), alpha) for matrix, size in zip(matrices, counts, strict=True)
            ]
            # Below order 1 the noise of a missing rank counts, about sqrt(1e-16) for each direction of 24.
            close = 1e-5 if alpha < 1 and rank < n else 1e-10
            np.testing.assert_allclose(spectral_entropy(matrices, inputs, alpha=alpha), expected, rtol=0, atol=close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_matrix_has_no_spectrum_and_no_entropy(dtype: torch.dtype) -> None:
    nothing = torch.zeros(2, 3, 4, 4, dtype=dtype)
    sizes = torch.tensor([[0, 1, 2], [3, 4, 4]])
    for inputs in (None, sizes):
        assert not eigenvalues(nothing, inputs).any()
        for alpha in ORDERS:
            actual = spectral_entropy(nothing, inputs, alpha=alpha)
            assert actual.tolist() == [[0.0] * 3] * 2
            assert not actual.signbit().any()  # 0, not -0, which would be printed


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e8, 1e30])
def test_tiny_and_huge_matrices_keep_their_shares(scale: float) -> None:
    matrices = matrices_of(9, 9, torch.float64)
    np.testing.assert_allclose(eigenvalues(scale * matrices), scale * eigenvalues(matrices), rtol=1e-9)
    for alpha in ORDERS:
        actual = spectral_entropy(scale * matrices, alpha=alpha)
        np.testing.assert_allclose(actual, spectral_entropy(matrices, alpha=alpha), rtol=0, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_keep_their_order_for_any_split_of_the_work(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in no order, some of them alone, none, and more matrices than threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(spectra, "_INLINE_WORK", 0)
    order = [3, 8, 0, 5, 8, 1, 5, 5, 2, 8, 3]
    matrices = matrices_of(8, 8, torch.float64, count=len(order))
    expected = np.stack([numpy_values(matrix, size) for matrix, size in zip(matrices, order, strict=True)])
    np.testing.assert_allclose(eigenvalues(matrices, torch.tensor(order)), expected, rtol=0, atol=1e-11)
    np.testing.assert_allclose(
        eigenvalues(matrices[:, :5, :5]), [numpy_values(matrix[:5, :5], 5) for matrix in matrices], atol=1e-11
    )
