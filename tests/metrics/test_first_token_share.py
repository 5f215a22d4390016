from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midlayer_encoders.metrics import FirstTokenShare, first_token_share
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import random_rotation, random_rows


def sink_by_definition(path: Tensor) -> Tensor:
    """The squared length of the first token over the sum of all."""
    squares = [float(token @ token) for token in path]
    return torch.tensor(squares[0] / sum(squares), dtype=torch.float64)


def test_function_and_class_match_the_definition() -> None:
    texts = corpus()
    expected = torch.stack([torch.stack([sink_by_definition(text) for text in layer]) for layer in texts.texts])
    torch.testing.assert_close(first_token_share(texts.states, texts.mask.expand(3, -1, -1)), expected)
    torch.testing.assert_close(value("first_token_share", texts), expected.mean(dim=1))


def test_known_values() -> None:
    assert first_token_share(torch.ones(8, 3)) == pytest.approx(1 / 8)
    massive = torch.ones(8, 3)
    massive[0] = 1e18
    assert first_token_share(massive) == 1.0
    assert first_token_share(torch.ones(1, 3)) == 1.0
    assert first_token_share(torch.tensor([[0.0], [2.0]])) == 0.0


def test_first_real_token_is_used() -> None:
    path = random_rows(6, 4)
    mask = torch.tensor([False, False, True, True, True, False])
    torch.testing.assert_close(first_token_share(path, mask), sink_by_definition(path[2:5]))


def test_scale_and_rotation_do_not_matter() -> None:
    path = random_rows(6, 4)
    torch.testing.assert_close(first_token_share(3 * path @ random_rotation(4)), first_token_share(path))


def test_empty_and_zero_texts_are_skipped_and_counted() -> None:
    states = torch.ones(3, 4, 2)
    states[1] = 0.0
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2] = False
    assert first_token_share(states, mask).isnan().tolist() == [False, True, True]
    metric = FirstTokenShare([0])
    metric.update(states, mask, layer=0)
    assert metric.skipped.tolist() == [2]
    assert metric.compute().tolist() == [0.25]
