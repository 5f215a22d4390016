from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.metrics import effective_rank, matrix_entropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import entropy_of_shares, random_rotation, random_rows


def rank_by_definition(rows: Tensor) -> Tensor:
    """Exp of the entropy of singular values as shares of their sum (Roy & Vetterli, 2007)."""
    sigma = np.linalg.svd(rows.double().numpy(), compute_uv=False)
    return torch.tensor(math.exp(entropy_of_shares((sigma / sigma.sum()).tolist(), 1.0)), dtype=torch.float64)


@pytest.mark.parametrize(("texts", "width"), [(4, 9), (13, 5), (6, 6)])
def test_function_and_class_match_the_definition(texts: int, width: int) -> None:
    sample = corpus(texts=texts, width=width)
    expected = torch.stack([rank_by_definition(layer) for layer in sample.pooled])
    torch.testing.assert_close(effective_rank(sample.pooled), expected)
    torch.testing.assert_close(value("effective_rank", sample, torch.arange(texts).split(3)), expected)


def test_centered_and_unit_rows() -> None:
    rows = corpus().pooled[0]
    centered = rows - rows.mean(dim=0)
    torch.testing.assert_close(effective_rank(rows, center=True), rank_by_definition(centered))
    unit = torch.stack([row / row.norm() for row in rows])
    torch.testing.assert_close(effective_rank(rows, unit=True), rank_by_definition(unit))
    torch.testing.assert_close(value("effective_rank", corpus(), center=True)[0], rank_by_definition(centered))


def test_known_values() -> None:
    torch.testing.assert_close(effective_rank(torch.eye(6)), torch.tensor(6.0))
    assert effective_rank(torch.zeros(3, 4)) == 0.0
    assert effective_rank(torch.ones(1, 4)) == 1.0
    # Singular values 3 and 1, not their squares: shares 3/4 and 1/4.
    shares = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(
        effective_rank(torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))),
        (-(shares * shares.log()).sum()).exp(),
    )


def test_rounding_adds_no_rank() -> None:
    rank_one = torch.outer(random_rows(40, 1)[:, 0], random_rows(30, 1, 1)[:, 0])
    torch.testing.assert_close(effective_rank(rank_one), torch.tensor(1.0, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 9), d=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_order_of_effective_rank_and_entropy(n: int, d: int, seed: int) -> None:
    """The paper's Theorem 1 states EffRank <= exp(S_1), but the opposite holds.

    Squaring singular values makes their shares more uneven, so the entropy of the squares is smaller.
    """
    rows = random_rows(n, d, seed) * torch.arange(1, d + 1) ** -0.5
    assert matrix_entropy(rows).exp() <= effective_rank(rows) + 1e-9
    assert 1 - 1e-9 <= effective_rank(rows) <= min(n, d) + 1e-9


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 9), d=st.integers(1, 9), seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_scale_rotation_and_transposition_do_not_matter(n: int, d: int, seed: int, scale: float) -> None:
    rows = random_rows(n, d, seed)
    expected = effective_rank(rows)
    torch.testing.assert_close(effective_rank(scale * rows @ random_rotation(d, seed)), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(effective_rank(rows.mT), expected, rtol=1e-6, atol=1e-6)


def test_one_invalid_set_does_not_affect_the_others() -> None:
    rows = torch.stack([random_rows(4, 5), random_rows(4, 5, 1)])
    rows[0, 2, 2] = torch.inf
    values = effective_rank(rows)
    assert values[0].isnan()
    torch.testing.assert_close(values[1], rank_by_definition(rows[1]))
