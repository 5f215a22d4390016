from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import Alignment, alignment
from tests.metrics.feeding import corpus, feed, value
from tests.metrics.oracles import random_rotation, random_rows


def alignment_by_definition(texts: np.ndarray, copies: np.ndarray, center: bool = True) -> float:
    """Average the cosine of one text after the other, both minus the mean of the texts."""
    mean = sum(texts) / len(texts) if center else 0.0
    cosines = []
    for text, copy in zip(texts, copies, strict=True):
        x, y = text - mean, copy - mean
        cosines.append(sum(x * y) / math.sqrt(sum(x * x) * sum(y * y)))
    return float(sum(cosines) / len(cosines))


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(("texts", "width"), [(2, 3), (13, 5), (6, 9)])
def test_function_and_class_match_the_definition(texts: int, width: int, center: bool) -> None:
    sample = corpus(texts=texts, width=width)
    sample.views.add_(torch.tensor([0.5, 0.9, 0.0], dtype=torch.float64)[:, None, None])  # another mean in each view
    expected = [alignment_by_definition(layer[0].numpy(), layer[1].numpy(), center) for layer in sample.views]
    function = [float(alignment(*layer[:2], center=center)) for layer in sample.views]
    assert function == pytest.approx(expected, rel=1e-12, abs=1e-12)
    actual = value("alignment", sample, torch.arange(texts).split(4), center=center)
    assert actual.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    swapped = [float(alignment(*layer[:2].flip(0), center=center)) for layer in sample.views]
    assert (swapped == pytest.approx(expected)) == (not center), "only the mean of the texts is subtracted"


def test_known_values() -> None:
    rows = random_rows(9, 4)
    assert alignment(rows, rows) == pytest.approx(1.0)
    assert alignment(rows, 2 * rows.mean(dim=0) - rows) == pytest.approx(-1.0), "mirrored at the mean"
    offset = 1e4 * torch.ones(4, dtype=torch.float64)
    other = random_rows(9, 4, 1)
    assert alignment(rows + offset, other + offset) == pytest.approx(float(alignment(rows, other)), abs=1e-8)
    assert alignment(rows + offset, other + offset, center=False) > 0.999, "a common component hides the difference"


def test_is_the_alignment_loss_of_wang_and_isola_up_to_its_sign() -> None:
    first, second = (rows / rows.norm(dim=1, keepdim=True) for rows in (random_rows(20, 6), random_rows(20, 6, 1)))
    loss = (first - second).norm(p=2, dim=1).pow(2).mean()  # as in the paper's code, alpha = 2
    torch.testing.assert_close(alignment(first, second, center=False), 1 - loss / 2)


def test_equal_texts_have_no_direction() -> None:
    same = 0.3 * torch.arange(1.0, 6.0, dtype=torch.float64).expand(9, 5)
    assert alignment(same, same) == 0.0, "differences from the mean are rounding"
    assert alignment(same, same, center=False) == pytest.approx(1.0)
    zeros = torch.zeros(4, 3)
    assert alignment(zeros, zeros, center=False) == alignment(zeros, zeros + 1.0) == 0.0


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 8), d=st.integers(2, 6), seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_range_scale_rotation_shift_and_order(n: int, d: int, seed: int, scale: float) -> None:
    first, second = random_rows(n, d, seed), random_rows(n, d, seed + 1)
    expected = alignment(first, second)
    assert -1 <= expected <= 1
    rotation, order = random_rotation(d, seed), torch.randperm(n)
    transformed = (scale * rows[order] @ rotation + 3.0 for rows in (first, second))
    torch.testing.assert_close(alignment(*transformed), expected, rtol=1e-8, atol=1e-8)


def test_texts_and_copies_arrive_in_any_order() -> None:
    texts = corpus()
    metric = Alignment([0])
    for view, batch in ((1, slice(5, 13)), (0, slice(0, 13)), (1, slice(0, 5))):
        metric.update(texts.views[0, view, batch], layer=0, view=view, index=torch.arange(13)[batch])
    expected = alignment_by_definition(texts.views[0, 0].numpy(), texts.views[0, 1].numpy())
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-12)


def test_mean_and_cosines_are_those_of_the_sample() -> None:
    texts = corpus(texts=30)
    metric = feed(Alignment(range(3), max_samples=12), texts, torch.arange(30).split(7))
    actual = metric.compute()
    sample = metric._samples([0])[0][1].numpy()
    assert len(sample) == 12
    expected = [alignment_by_definition(layer[0].numpy()[sample], layer[1].numpy()[sample]) for layer in texts.views]
    assert actual.tolist() == pytest.approx(expected, rel=1e-12)


def test_half_precision_is_computed_in_double_precision_on_a_cpu() -> None:
    first, second = random_rows(20, 8).to(torch.bfloat16), random_rows(20, 8, 1).to(torch.bfloat16)
    actual = alignment(first, second)
    assert actual.dtype == torch.float32
    expected = alignment_by_definition(first.double().numpy(), second.double().numpy())
    assert float(actual) == pytest.approx(expected, rel=1e-6)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="N of 2 or more"):
        alignment(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(OptionError, match=r"but got \(2, 3\) and \(2, 4\)"):
        alignment(torch.ones(2, 3), torch.ones(2, 4))
    for bad in (math.nan, math.inf):
        rows = torch.tensor([[1.0, bad], [2.0, 3.0], [0.0, 1.0]])
        assert alignment(rows, torch.ones(3, 2)).isnan()
        assert alignment(torch.eye(3, 2), rows).isnan()
