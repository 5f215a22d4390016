from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import BlockInfluence, block_influence
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import cosine, random_rotation, random_rows


def influence_by_definition(before: Tensor, after: Tensor) -> Tensor:
    """One minus the mean cosine of a token's states before and after."""
    cosines = [cosine(a, b) for a, b in zip(before, after, strict=True) if a.norm() > 0 and b.norm() > 0]
    return torch.tensor(1 - sum(cosines) / len(cosines), dtype=torch.float64)


def test_function_and_class_match_the_definition() -> None:
    texts = corpus()
    expected = torch.stack(
        [
            torch.stack([influence_by_definition(a, b) for a, b in zip(before, after, strict=True)])
            for before, after in zip(texts.texts, texts.texts[1:], strict=False)
        ]
    )
    mask = texts.mask.expand(2, -1, -1)
    torch.testing.assert_close(block_influence(texts.states[:-1], texts.states[1:], mask=mask), expected)
    values = value("block_influence", texts, torch.arange(13).split(4))
    assert values[0].isnan(), "the first layer has no predecessor"
    torch.testing.assert_close(values[1:], expected.mean(dim=1))


def test_known_values() -> None:
    states = random_rows(5, 4)
    assert block_influence(states, 3 * states) == pytest.approx(0.0, abs=1e-12)
    assert block_influence(states, -states) == pytest.approx(2.0)
    assert block_influence(torch.eye(4), torch.eye(4).roll(1, 0)) == pytest.approx(1.0)


def test_zero_tokens_are_skipped_and_a_text_of_them_counted() -> None:
    before, after = random_rows(5, 4), random_rows(5, 4, 1)
    after[2] = 0.0
    torch.testing.assert_close(block_influence(before, after), influence_by_definition(before, after))
    assert block_influence(before, torch.zeros(5, 4)).isnan()
    metric = BlockInfluence([0, 1])
    mask = torch.ones(2, 5, dtype=torch.bool)
    metric.update(before.expand(2, 5, 4), mask, layer=0)
    metric.update(torch.stack([after, torch.zeros(5, 4)]), mask, layer=1)
    assert metric.skipped.tolist() == [0, 1]
    torch.testing.assert_close(metric.compute()[1], influence_by_definition(before, after))


def test_scale_and_rotation_do_not_matter() -> None:
    before, after, rotation = random_rows(5, 4), random_rows(5, 4, 1), random_rotation(4)
    torch.testing.assert_close(block_influence(3 * before @ rotation, after @ rotation), block_influence(before, after))


def test_states_are_stored_for_the_current_batch_only() -> None:
    texts, metric = corpus(), BlockInfluence([0, 1, 2])
    for layer in range(3):
        metric.update(texts.states[layer], texts.mask, layer=layer)
        assert (metric._previous is not None) == (layer < 2)
    metric.update(texts.states[0], texts.mask, layer=0)
    metric.reset()
    assert metric._previous is None


def test_layers_out_of_order_are_refused() -> None:
    texts, metric = corpus(), BlockInfluence([0, 4, 8])
    with pytest.raises(OptionError, match="`layer` 4 must follow layer 0 of the same batch"):
        metric.update(texts.states[1], texts.mask, layer=4)
    metric.update(texts.states[0], texts.mask, layer=0)
    with pytest.raises(OptionError, match="`layer` 8 must follow layer 4 of the same batch"):
        metric.update(texts.states[2], texts.mask, layer=8)
    metric.update(texts.states[0, :3], texts.mask[:3], layer=0)
    with pytest.raises(OptionError, match="of the same batch"):
        metric.update(texts.states[1], texts.mask, layer=4)
