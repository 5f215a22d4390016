from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import TooFewTextsError, Uniformity, uniformity
from tests.metrics.feeding import corpus, feed, value
from tests.metrics.oracles import random_rotation, random_rows


def uniformity_by_definition(rows: np.ndarray, t: float = 2.0, center: bool = True) -> float:
    """Sum the potential of one pair after the other."""
    rows = rows - rows.mean(axis=0) if center else rows
    unit = [row / math.sqrt(sum(number**2 for number in row)) for row in rows]
    potentials = [math.exp(-t * sum((unit[i] - unit[j]) ** 2)) for j in range(len(unit)) for i in range(j)]
    assert len(potentials) == len(rows) * (len(rows) - 1) / 2
    return math.log(sum(potentials) / len(potentials))


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("t", [0.5, 2.0])
@pytest.mark.parametrize(("texts", "width"), [(2, 3), (13, 5), (6, 9)])
def test_function_and_class_match_the_definition(texts: int, width: int, t: float, center: bool) -> None:
    sample = corpus(texts=texts, width=width)
    sample.pooled.add_(0.5)  # a mean, so that centering matters
    expected = [uniformity_by_definition(layer.numpy(), t, center) for layer in sample.pooled]
    function = [float(uniformity(layer, t=t, center=center)) for layer in sample.pooled]
    assert function == pytest.approx(expected, rel=1e-12, abs=1e-12)
    actual = value("uniformity", sample, torch.arange(texts).split(4), t=t, center=center)
    assert actual.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_known_values() -> None:
    pair = torch.tensor([[3.0, 1.0], [2.0, 5.0]], dtype=torch.float64)
    assert uniformity(pair) == pytest.approx(-8.0), "centered, two texts point in opposite directions"
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    right_and_opposite = math.log((4 * math.exp(-4) + 2 * math.exp(-8)) / 6)
    assert uniformity(square) == pytest.approx(right_and_opposite)
    assert uniformity(square + 100) == pytest.approx(right_and_opposite)
    assert uniformity(square + 100, center=False) > -0.01
    assert uniformity(square, t=500.0) == pytest.approx(-1000 + math.log(4 / 6)), "no underflow"
    wide = random_rows(60, 2000)
    assert uniformity(wide) == pytest.approx(-4.0, abs=0.1), "independent directions"


def test_equal_texts_are_least_uniform() -> None:
    same = 0.3 * torch.arange(1.0, 6.0, dtype=torch.float64).expand(9, 5)
    assert uniformity(same) == uniformity(same, center=False) == 0.0
    assert uniformity(torch.zeros(4, 3)) == 0.0
    middle = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)  # the last row is the mean
    assert uniformity(middle) == pytest.approx(math.log((2 * math.exp(-2) + math.exp(-8)) / 3))


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 8), d=st.integers(1, 6), seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_range_scale_rotation_shift_and_order(n: int, d: int, seed: int, scale: float) -> None:
    rows = random_rows(n, d, seed)
    expected = uniformity(rows)
    assert -8 - 1e-9 <= expected <= 1e-9
    transformed = scale * rows[torch.randperm(n)] @ random_rotation(d, seed) + 3.0
    torch.testing.assert_close(uniformity(transformed), expected, rtol=1e-8, atol=1e-8)


def test_more_texts_than_the_sample_are_all_pairs_of_the_sample() -> None:
    texts = corpus(texts=30)
    metric = feed(Uniformity(range(3), max_samples=12), texts, torch.arange(30).split(7))
    actual = metric.compute()
    sample = metric._samples([0])[0][1].numpy()
    assert len(sample) == 12
    expected = [uniformity_by_definition(layer.numpy()[sample]) for layer in texts.pooled]
    assert actual.tolist() == pytest.approx(expected, rel=1e-12)


def test_half_precision_is_computed_in_double_precision_on_a_cpu() -> None:
    rows = random_rows(20, 8).to(torch.bfloat16)
    actual = uniformity(rows)
    assert actual.dtype == torch.float32
    assert float(actual) == pytest.approx(uniformity_by_definition(rows.double().numpy()), rel=1e-6)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(TooFewTextsError, match="Rows of `embeddings` must be at least 2, but there are 1"):
        uniformity(torch.ones(1, 3))
    for wrong in (0.0, -2.0, math.nan):
        with pytest.raises(OptionError, match="`t` must be greater than 0"):
            uniformity(torch.ones(2, 3), t=wrong)
        with pytest.raises(OptionError, match="`t` must be greater than 0"):
            Uniformity([0], t=wrong)
    for bad in (math.nan, math.inf):
        assert uniformity(torch.tensor([[1.0, bad], [2.0, 3.0], [0.0, 1.0]])).isnan()
