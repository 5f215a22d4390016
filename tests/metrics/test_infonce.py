from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import InfoNCE, infonce
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows


def simclr_by_definition(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Each of the 2N views is matched with its partner among the 2N - 1 others."""
    views = [*first, *second]
    n, losses = len(first), []
    for i, view in enumerate(views):
        scores = [math.exp(cosine(view, other_item) / temperature) for other_item in views]
        partner = (i + n) % (2 * n)
        losses.append(-math.log(scores[partner] / (sum(scores) - scores[i])))
    return torch.tensor(sum(losses) / (2 * n), dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.1, 0.7])
def test_function_and_class_match_the_definition(temperature: float) -> None:
    texts = corpus()
    expected = torch.stack([simclr_by_definition(*layer[:2], temperature) for layer in texts.views])
    values = [infonce(*layer[:2], temperature=temperature) for layer in texts.views]
    torch.testing.assert_close(torch.stack(values), expected)
    batches = torch.arange(13).split(5)
    torch.testing.assert_close(value("infonce", texts, batches, temperature=temperature), expected)


def test_constant_embeddings_are_at_chance() -> None:
    same = random_rows(1, 4).expand(9, 4)
    assert infonce(same, same) == pytest.approx(math.log(2 * 9 - 1))
    zeros = torch.zeros(9, 4)
    assert infonce(zeros, zeros) == pytest.approx(math.log(17))


def test_loss_is_low_if_views_agree_and_texts_differ() -> None:
    views = torch.eye(5, dtype=torch.float64)
    assert infonce(views, views) == pytest.approx(math.log(1 + 8 * math.exp(-10)))
    assert infonce(views, -views) > 10


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 8), d=st.integers(1, 6), seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_bound_scale_rotation_and_order(n: int, d: int, seed: int, scale: float) -> None:
    first, second = random_rows(n, d, seed), random_rows(n, d, seed + 1)
    assert infonce(first, second) >= 0
    expected = infonce(first, second)
    rotation, order = random_rotation(d, seed), torch.randperm(n)
    transformed = infonce(scale * first[order] @ rotation, second[order] @ rotation)
    torch.testing.assert_close(transformed, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(infonce(second, first), expected, rtol=1e-9, atol=1e-9)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="N of 2 or more"):
        infonce(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(OptionError, match=r"but got \(2, 3\) and \(2, 4\)"):
        infonce(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(OptionError, match="`temperature` must be greater than 0"):
        InfoNCE([0], temperature=0.0)
