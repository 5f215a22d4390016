"""Metrics of tokens: which tokens and texts count, and texts that are computed together with later layers."""

import math

import pytest
import torch

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import (
    BlockInfluence,
    Curvature,
    FirstTokenShare,
    HalfMatch,
    PromptEffectiveRank,
    PromptEntropy,
    TooFewTextsError,
    block_influence,
    curvature,
    first_token_share,
    prompt_effective_rank,
    prompt_entropy,
)
from midlayer_encoders.metrics.sample_metrics import half_means
from tests.metrics import oracles
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import random_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step", [1, 2])
def test_curvature_of_known_paths(dtype: torch.dtype, step: int) -> None:
    along, across = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([-1.0, 3.0, 0.0])
    line = torch.arange(9.0)[:, None] * along + 0.3
    assert curvature(line.to(dtype), step=step) == pytest.approx(0.0, abs=1e-6)
    back_and_forth = torch.tensor([0.0, 0.0, 1.0, 1.0] * 3)[:: 2 // step, None] * along
    assert curvature(back_and_forth.to(dtype), step=step) == pytest.approx(math.pi, abs=1e-6)
    zigzag = torch.cumsum(torch.stack([along, across / across.norm() * along.norm()] * 4), dim=0)
    assert curvature(zigzag.to(dtype)) == pytest.approx(math.pi / 2, abs=1e-6)


def test_curvature_skips_zero_differences_masked_tokens_and_texts_without_angles() -> None:
    path = random_rows(8, 4)
    mask = torch.tensor([True, True, False, True, True, False, True, True])
    torch.testing.assert_close(curvature(path, mask), oracles.curvature(path[mask]))
    path[3] = path[2]
    torch.testing.assert_close(curvature(path), oracles.curvature(path))
    for short, step in ((path[:2], 1), (path[:1], 1), (path[:4], 2), (torch.ones(5, 3), 1)):
        assert curvature(short, step=step).isnan()
    metric = Curvature([0])
    metric.update(path.expand(4, 8, 4), torch.arange(8) < torch.tensor([[8], [2], [0], [5]]), layer=0)
    assert (metric.count.tolist(), metric.skipped.tolist()) == ([2], [2])
    torch.testing.assert_close(metric.compute()[0], (oracles.curvature(path) + oracles.curvature(path[:5])) / 2)


def test_first_real_token_is_used_and_empty_and_zero_texts_are_skipped() -> None:
    path = random_rows(6, 4)
    mask = torch.tensor([False, False, True, True, True, False])
    torch.testing.assert_close(first_token_share(path, mask), oracles.first_token_share(path[2:5]))
    states, real = torch.ones(3, 4, 2), torch.ones(3, 4, dtype=torch.bool)
    states[1], real[2] = 0.0, False
    assert first_token_share(states, real).isnan().tolist() == [False, True, True]
    metric = FirstTokenShare([0])
    metric.update(states, real, layer=0)
    assert metric.skipped.tolist() == [2]
    assert metric.compute().tolist() == [0.25]


@pytest.mark.parametrize(
    ("metric_class", "function"), [(PromptEntropy, prompt_entropy), (PromptEffectiveRank, prompt_effective_rank)]
)
def test_texts_under_two_tokens_are_skipped_and_counted(metric_class: type[PromptEntropy], function: object) -> None:
    texts = corpus()
    mask = texts.mask.clone()
    mask[2, 1:], mask[5] = False, False
    metric = metric_class([0])
    metric.update(texts.states[0], mask, layer=0)
    assert (metric.count.tolist(), metric.skipped.tolist()) == ([11], [2])
    kept = [i for i in range(13) if i not in (2, 5)]
    torch.testing.assert_close(metric.compute()[0], function(texts.states[0, kept], mask[kept]).mean())  # type: ignore[operator]


@pytest.mark.parametrize("tokens", [5, 20])
def test_one_mask_may_serve_all_texts(tokens: int) -> None:
    states = torch.randn(3, tokens, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(tokens)[None] < 4
    torch.testing.assert_close(prompt_effective_rank(states, mask), prompt_effective_rank(states[:, :4]))


def test_massive_first_token_keeps_the_precision() -> None:
    states = random_rows(20, 32)
    states[0] *= 1e4
    torch.testing.assert_close(prompt_entropy(states.float()), oracles.prompt_entropy(states.float().double()).float())


@pytest.mark.parametrize(
    ("metric_class", "tokens", "message"),
    [
        (PromptEntropy, 1, "long enough for PromptEntropy at layer 4 must be at least 1"),
        (HalfMatch, 3, "texts of 4 tokens or more for HalfMatch at layer 4 must be at least 2"),
    ],
)
def test_only_short_texts_are_refused(metric_class: type[PromptEntropy], tokens: int, message: str) -> None:
    metric = metric_class([4])
    metric.update(torch.ones(3, tokens, 2), torch.ones(3, tokens, dtype=torch.bool), layer=4)
    with pytest.raises(TooFewTextsError, match=message):
        metric.compute()


@pytest.mark.parametrize(
    ("name", "metric_class", "width"),
    [("prompt_entropy", PromptEntropy, 3), ("prompt_entropy", PromptEntropy, 12), ("curvature", Curvature, 5)],
)
def test_texts_computed_with_later_layers_have_the_same_values(
    name: str, metric_class: type[PromptEntropy], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = corpus(width=width)
    expected = value(name, texts)
    monkeypatch.setattr(metric_class, "_waits", lambda *_: True)
    for together in (1, 2000, 10_000, 2**27):  # computed immediately, in the middle, and at the end
        monkeypatch.setattr(metric_class, "_max_waiting_bytes", together)
        torch.testing.assert_close(value(name, texts), expected)


def test_block_influence_skips_zero_tokens_and_counts_a_text_of_them() -> None:
    before, after = random_rows(5, 4), random_rows(5, 4, 1)
    after[2] = 0.0
    torch.testing.assert_close(block_influence(before, after), oracles.block_influence(before, after))
    assert block_influence(before, torch.zeros(5, 4)).isnan()
    metric = BlockInfluence([0, 1])
    mask = torch.ones(2, 5, dtype=torch.bool)
    metric.update(before.expand(2, 5, 4), mask, layer=0)
    metric.update(torch.stack([after, torch.zeros(5, 4)]), mask, layer=1)
    assert metric.skipped.tolist() == [0, 1]
    torch.testing.assert_close(metric.compute()[1], oracles.block_influence(before, after))


def test_block_influence_stores_states_of_the_current_batch_only() -> None:
    texts, metric = corpus(), BlockInfluence([0, 1, 2])
    for layer in range(3):
        metric.update(texts.states[layer], texts.mask, layer=layer)
        assert (metric._previous is not None) == (layer < 2)
    metric.update(texts.states[0], texts.mask, layer=0)
    metric.reset()
    assert metric._previous is None


def test_block_influence_refuses_layers_out_of_order() -> None:
    texts, metric = corpus(), BlockInfluence([0, 4, 8])
    with pytest.raises(OptionError, match="`layer` 4 must follow layer 0 of the same batch"):
        metric.update(texts.states[1], texts.mask, layer=4)
    metric.update(texts.states[0], texts.mask, layer=0)
    with pytest.raises(OptionError, match="`layer` 8 must follow layer 4 of the same batch"):
        metric.update(texts.states[2], texts.mask, layer=8)
    metric.update(texts.states[0, :3], texts.mask[:3], layer=0)
    with pytest.raises(OptionError, match="of the same batch"):
        metric.update(texts.states[1], texts.mask, layer=4)


def test_means_of_the_halves_on_either_side_of_padding() -> None:
    states = torch.arange(12.0).reshape(1, 6, 2).repeat(2, 1, 1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    expected = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[6.0, 7.0], [8.0, 9.0]]])  # 2 tokens, then the other 3
    torch.testing.assert_close(half_means(states, mask), expected)
