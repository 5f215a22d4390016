from __future__ import annotations

import pytest
import torch

from midlayer_encoders.metrics import PromptEffectiveRank, prompt_effective_rank
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import centered_unit
from tests.metrics.test_effective_rank import rank_by_definition


@pytest.mark.parametrize("width", [3, 12])
def test_function_and_class_match_the_definition(width: int) -> None:
    texts = corpus(width=width)
    expected = torch.stack([torch.stack([rank_by_definition(text) for text in layer]) for layer in texts.texts])
    torch.testing.assert_close(prompt_effective_rank(texts.states, texts.mask.expand(3, -1, -1)), expected)
    torch.testing.assert_close(value("prompt_effective_rank", texts), expected.mean(dim=1))


def test_centered_and_scaled_tokens() -> None:
    texts = corpus(width=12)
    expected = [rank_by_definition(centered_unit(text)) for text in texts.texts[0]]
    values = value("prompt_effective_rank", texts, center=True, unit=True)
    torch.testing.assert_close(values[0], torch.stack(expected).mean())


def test_texts_under_two_tokens_are_skipped_and_counted() -> None:
    metric = PromptEffectiveRank([0])
    metric.update(torch.eye(3).expand(2, 3, 3), torch.tensor([[True] * 3, [True, False, False]]), layer=0)
    assert metric.skipped.tolist() == [1]
    torch.testing.assert_close(metric.compute(), torch.tensor([3.0], dtype=torch.float64))


@pytest.mark.parametrize("tokens", [5, 20])
def test_one_mask_may_serve_all_texts(tokens: int) -> None:
    states = torch.randn(3, tokens, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(tokens)[None] < 4
    torch.testing.assert_close(prompt_effective_rank(states, mask), prompt_effective_rank(states[:, :4]))
