from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import cka
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import random_rotation, random_rows


def cka_by_definition(x: Tensor, y: Tensor) -> Tensor:
    """tr(K H L H) over the root of tr(K H K H) tr(L H L H), with H the centering matrix."""
    n = len(x)
    centering = torch.eye(n, dtype=torch.float64) - torch.full((n, n), 1 / n, dtype=torch.float64)

    def hsic(k: Tensor, l: Tensor) -> Tensor:
        return torch.trace(k @ centering @ l @ centering)

    k, l = x @ x.T, y @ y.T
    return hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()


def feature_cka(x: Tensor, y: Tensor) -> Tensor:
    """Kornblith et al. (2019), equation in features: |Y'X|^2 / (|X'X| |Y'Y|) of centered columns."""
    x, y = x - x.mean(dim=0), y - y.mean(dim=0)
    return (y.T @ x).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())


def unbiased_by_definition(x: Tensor, y: Tensor) -> Tensor:
    """CKA from the U-statistic of HSIC: the mean over all four different texts (Song et al., 2012, equation 4)."""
    n = len(x)

    def hsic(k: Tensor, l: Tensor) -> Tensor:
        total, count = torch.tensor(0.0, dtype=torch.float64), 0
        for i in range(n):
            for j in range(n):
                for q in range(n):
                    for r in range(n):
                        if len({i, j, q, r}) == 4:
                            total += k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q])
                            count += 1
        return total / count

    k, l = x @ x.T, y @ y.T
    return hsic(k, l) / (hsic(k, k) * hsic(l, l)).sqrt()


@pytest.mark.parametrize("oracle", [cka_by_definition, feature_cka])
@pytest.mark.parametrize(("n", "d"), [(4, 9), (13, 5)])
def test_function_and_class_match_the_definition(n: int, d: int, oracle) -> None:  # type: ignore[no-untyped-def]
    texts = corpus(texts=n, width=d)
    first, second, third = texts.pooled
    torch.testing.assert_close(cka(first, second), oracle(first, second))
    torch.testing.assert_close(cka(first, third[:, :2]), oracle(first, third[:, :2]))
    expected = torch.stack([oracle(first, second), oracle(second, third)])
    values = value("cka", texts, torch.arange(n).split(3))
    assert values[0].isnan()
    torch.testing.assert_close(values[1:], expected)


def test_unbiased_matches_the_mean_over_four_different_texts() -> None:
    first, second = random_rows(7, 3), random_rows(7, 3) + random_rows(7, 3, 1)
    torch.testing.assert_close(cka(first, second, unbiased=True), unbiased_by_definition(first, second))


def test_unbiased_cka_is_near_zero_where_plain_cka_is_not() -> None:
    first, second = random_rows(20, 200), random_rows(20, 200, 1)
    assert cka(first, second) > 0.8
    assert abs(float(cka(first, second, unbiased=True))) < 0.1


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 9), d=st.integers(1, 9), seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_range_scale_rotation_shift_and_symmetry(n: int, d: int, seed: int, scale: float) -> None:
    first, second = random_rows(n, d, seed), random_rows(n, 4, seed + 1)
    expected = cka(first, second)
    assert -1e-12 <= expected <= 1 + 1e-9
    transformed = scale * first @ random_rotation(d, seed) + 1.0
    torch.testing.assert_close(cka(transformed, second), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cka(second, first), expected)
    torch.testing.assert_close(cka(first, transformed), torch.ones_like(expected), rtol=1e-6, atol=1e-6)


def test_constant_rows_have_no_cka() -> None:
    assert cka(0.1 * torch.ones(5, 3), random_rows(5, 3)) == 0.0


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="N of 2 or more"):
        cka(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(OptionError, match="N of 4 or more"):
        cka(torch.ones(3, 3), torch.ones(3, 3), unbiased=True)
    with pytest.raises(OptionError, match=r"but got \(3, 3\) and \(4, 3\)"):
        cka(torch.ones(3, 3), torch.ones(4, 3))
