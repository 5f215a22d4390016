from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midlayer_encoders.metrics import Normalization, PromptEntropy, TooFewTextsError, prompt_entropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import centered_unit, entropy_by_definition, random_rotation, random_rows


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [3, 12])
def test_function_and_class_match_the_definition(width: int, alpha: float) -> None:
    texts = corpus(width=width)
    expected = torch.stack(
        [torch.stack([entropy_by_definition(centered_unit(text), alpha) for text in layer]) for layer in texts.texts]
    )
    torch.testing.assert_close(prompt_entropy(texts.states, texts.mask.expand(3, -1, -1), alpha=alpha), expected)
    torch.testing.assert_close(value("prompt_entropy", texts, alpha=alpha), expected.mean(dim=1))


@pytest.mark.parametrize(("center", "unit"), [(False, False), (True, False), (False, True)])
def test_raw_states_and_partial_preparation(center: bool, unit: bool) -> None:
    states = 1.0 + random_rows(5, 8)
    rows = states - states.mean(dim=0) if center else states
    rows = torch.stack([row / row.norm() for row in rows]) if unit else rows
    torch.testing.assert_close(prompt_entropy(states, center=center, unit=unit), entropy_by_definition(rows))
    metric = PromptEntropy([0], center=center, unit=unit)
    metric.update(states[None], torch.ones(1, 5, dtype=torch.bool), layer=0)
    torch.testing.assert_close(metric.compute()[0], entropy_by_definition(rows))


@pytest.mark.parametrize("normalization", ["maxEntropy", "logN", "logD", "logNlogD"])
def test_normalization_counts_the_tokens_of_each_text(normalization: Normalization) -> None:
    texts = corpus()
    expected = []
    for text in texts.texts[0]:
        n, d = math.log(len(text)), math.log(5)
        divisor = {"maxEntropy": min(n, d), "logN": n, "logD": d, "logNlogD": n * d}[normalization]
        expected.append(entropy_by_definition(centered_unit(text)) / divisor)
    torch.testing.assert_close(
        value("prompt_entropy", texts, normalization=normalization)[0], torch.stack(expected).mean()
    )


def test_known_values() -> None:
    simplex = prompt_entropy(torch.eye(5))  # five corners span four dimensions evenly
    torch.testing.assert_close(simplex, torch.tensor(math.log(4)))
    line = torch.arange(6.0)[:, None] * torch.tensor([1.0, 2.0, 3.0])
    assert prompt_entropy(line) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_repeated_token_has_zero_entropy(dtype: torch.dtype) -> None:
    repeated = (0.1 * random_rows(1, 8)).to(dtype).expand(11, 8)
    assert prompt_entropy(repeated) == 0.0


def test_massive_first_token_keeps_the_precision() -> None:
    states = random_rows(20, 32)
    states[0] *= 1e4
    torch.testing.assert_close(
        prompt_entropy(states.float()), entropy_by_definition(centered_unit(states.float().double())).float()
    )


def test_texts_under_two_tokens_are_skipped_and_counted() -> None:
    texts = corpus()
    mask = texts.mask.clone()
    mask[2, 1:], mask[5] = False, False
    metric = PromptEntropy([0])
    metric.update(texts.states[0], mask, layer=0)
    assert (metric.count.tolist(), metric.skipped.tolist()) == ([11], [2])
    saved = [i for i in range(13) if i not in (2, 5)]
    torch.testing.assert_close(metric.compute()[0], prompt_entropy(texts.states[0, saved], mask[saved]).mean())


def test_only_short_texts_are_refused() -> None:
    metric = PromptEntropy([4])
    metric.update(torch.ones(3, 1, 2), torch.ones(3, 1, dtype=torch.bool), layer=4)
    with pytest.raises(TooFewTextsError, match="long enough for PromptEntropy at layer 4 must be at least 1"):
        metric.compute()


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 8), d=st.integers(1, 8), seed=st.integers(0, 10_000), left=st.integers(0, 3))
def test_scale_rotation_shift_and_padding_do_not_matter(n: int, d: int, seed: int, left: int) -> None:
    states = random_rows(n, d, seed)
    transformed = 7.0 * states @ random_rotation(d, seed) + random_rows(1, d, seed + 1)
    padded = torch.cat([torch.full((left, d), 9.0), transformed, torch.full((2, d), -9.0)])
    mask = torch.tensor([False] * left + [True] * n + [False] * 2)
    value = prompt_entropy(padded, mask)
    torch.testing.assert_close(value, prompt_entropy(states), rtol=1e-6, atol=1e-6)
    assert -1e-9 <= value <= math.log(max(1, min(n - 1, d))) + 1e-6


@pytest.mark.parametrize("width", [3, 12])
def test_matrices_computed_with_later_layers_are_the_same(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus(width=width)
    expected = value("prompt_entropy", texts)
    monkeypatch.setattr(PromptEntropy, "_waits", lambda *_: True)
    for together in (1, 10_000, 2**27):  # computed immediately, in the middle, and at the end
        monkeypatch.setattr(PromptEntropy, "_max_waiting_bytes", together)
        torch.testing.assert_close(value("prompt_entropy", texts), expected)
