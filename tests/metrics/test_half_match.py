from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import HalfMatch, TooFewTextsError, half_match
from midlayer_encoders.metrics.sample_metrics import half_means
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows


def half_match_by_definition(texts: list[Tensor], center: bool) -> Tensor:
    """For each half, count the halves that are nearer than its other half, and those equally near."""
    texts = [text for text in texts if len(text) >= 4]
    sides = [
        torch.stack([text[: len(text) // 2].mean(dim=0) for text in texts]),
        torch.stack([text[len(text) // 2 :].mean(dim=0) for text in texts]),
    ]
    if center:
        sides = [side - side.mean(dim=0) for side in sides]
    actual = []
    for here, there in (sides, sides[::-1]):
        for i, half in enumerate(here):
            scores = [cosine(half, other_item) for other_item in there]
            before = sum(score > scores[i] + 1e-12 for score in scores)
            beside = sum(abs(score - scores[i]) <= 1e-12 for score in scores) - 1
            actual.append(1 / (1 + before + beside / 2))
    return torch.tensor(sum(actual) / len(actual), dtype=torch.float64)


@pytest.mark.parametrize("center", [True, False])
def test_class_matches_the_definition(center: bool) -> None:
    texts = corpus(texts=30)
    expected = torch.stack([half_match_by_definition(layer, center) for layer in texts.texts])
    assert min(len(text) for text in texts.texts[0]) < 4, "some are too short and left out"
    torch.testing.assert_close(value("half_match", texts, torch.arange(30).split(7), center=center), expected)


def test_means_of_the_halves_on_either_side_of_padding() -> None:
    states = torch.arange(12.0).reshape(1, 6, 2).repeat(2, 1, 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    expected = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[6.0, 7.0], [8.0, 9.0]]])  # 2 tokens, then the other 3
    torch.testing.assert_close(half_means(states, mask), expected)


def test_common_component_of_all_texts_is_removed() -> None:
    first = random_rows(20, 6)
    offset = 1e4 * torch.ones(6, dtype=torch.float64)  # a massive first token in the first half of every text
    assert half_match(first + offset, first) == 1
    assert half_match(first + offset, first, center=False) < 0.5
    assert half_match(first, first[torch.arange(20).roll(1)]) < 0.6


def test_equal_halves_share_their_ranks() -> None:
    same = random_rows(1, 4).expand(9, 4)
    assert half_match(same, same) == pytest.approx(1 / 5), "ranks 1 to 9, 5 on average"
    assert half_match(same, same, center=False) == pytest.approx(1 / 5)
    twice = random_rows(5, 8)[[0, 1, 2, 3, 4, 4]]
    assert half_match(twice, twice, center=False) == pytest.approx((4 + 2 / 1.5) / 6)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 8), d=st.integers(2, 6), seed=st.integers(0, 10_000), scale=st.floats(0.01, 100))
def test_range_scale_rotation_order_and_direction(n: int, d: int, seed: int, scale: float) -> None:
    first, second = random_rows(n, d, seed), random_rows(n, d, seed + 1)
    expected = half_match(first, second)
    assert 1 / n <= expected <= 1
    rotation, order = random_rotation(d, seed), torch.randperm(n)
    transformed = half_match(scale * first[order] @ rotation, second[order] @ rotation)
    torch.testing.assert_close(transformed, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(half_match(second, first), expected, rtol=1e-9, atol=1e-9)


def test_without_index_texts_are_numbered_in_order() -> None:
    texts = corpus()
    metric = HalfMatch(range(3))
    for batch in torch.arange(13).split(5):
        for layer in range(3):
            metric.update(texts.states[layer, batch], texts.mask[batch], layer=layer)
    assert torch.equal(metric.compute(), value("half_match", texts))
    assert metric.num_samples == int((texts.mask.sum(dim=1) >= 4).sum())


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="N of 2 or more"):
        half_match(torch.ones(1, 3), torch.ones(1, 3))
    metric = HalfMatch([0])
    metric.update(torch.ones(5, 3, 2), torch.ones(5, 3, dtype=torch.bool), layer=0)
    with pytest.raises(TooFewTextsError, match="texts of 4 tokens or more for HalfMatch at layer 0 must be at least 2"):
        metric.compute()
