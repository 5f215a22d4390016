"""Attention with a one in the softmax's denominator, against the formula written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.pretraining.attention import sink_free_attention
from benchmarks.pretraining.models import Size, language_model
from benchmarks.pretraining.variants import VARIANTS

B, H, T, D = 2, 3, 5, 4


def heads(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def padded() -> Tensor:
    """Return who sees whom in two texts, causal, the second with its last two tokens missing."""
    seen = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    seen[1, :, :, 3:] = False
    return seen


def written_out(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return what is gathered ``(B, T, H, D)`` and the weights ``(B, H, T, T)``."""
    weights = torch.zeros(B, H, T, T, dtype=query.dtype)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                sizes = [(scale * query[b, h, t] @ key[b, h, s]).exp() * seen[b, 0, t, s] for s in range(T)]
                weights[b, h, t] = torch.stack(sizes) / (1 + torch.stack(sizes).sum())
    return (weights @ value).transpose(1, 2), weights


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_a_softmax_with_one_in_its_denominator_with_gradients_and_without(
    masked: bool, scaling: float | None
) -> None:
    causal = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    expected, weights = written_out(*heads(), padded() if masked else causal, scaling or 1 / math.sqrt(D))
    mask = padded() if masked else None
    gathered, none = sink_free_attention(None, *heads(), mask, scaling=scaling)
    torch.testing.assert_close(gathered, expected)
    assert none is None
    with torch.no_grad():
        read, found = sink_free_attention(None, *heads(), mask, scaling=scaling)
    torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-6)  # the weights are in single precision
    torch.testing.assert_close(found, weights.float())
    assert found is not None
    assert (found.sum(-1) < 1).all()
    assert (found.sum(-1) > 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_its_gradients_are_those_of_the_formula(masked: bool) -> None:
    causal = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    ours, theirs = ([one.requires_grad_() for one in heads()] for _ in range(2))
    weigh = torch.randn(B, T, H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (sink_free_attention(None, *ours, padded() if masked else None)[0] * weigh).sum().backward()
    (written_out(*theirs, padded() if masked else causal, 1 / math.sqrt(D))[0] * weigh).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_model_trains_and_is_read_with_the_same_attention() -> None:
    size = Size(blocks=2, width=64, vocab=320, length=32)
    free, plain = (language_model(VARIANTS[name], size).backbone.eval() for name in ("no-sink", "base"))
    ids = torch.randint(4, size.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    trained = free(input_ids=ids).last_hidden_state
    with torch.no_grad():
        read = free(input_ids=ids, output_attentions=True)
        torch.testing.assert_close(trained, read.last_hidden_state)
        assert not torch.allclose(trained, plain(input_ids=ids).last_hidden_state)
    assert len(read.attentions) == 2
    assert all((weights.sum(-1) < 1).all() for weights in read.attentions)
