"""Attention in which no head needs the first token as its sink, against the formulas written out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.pretraining.attention import SINKS, attend_past_the_first, attend_with_a_place_for_nothing
from benchmarks.pretraining.models import Size, language_model
from benchmarks.pretraining.module import adamw
from benchmarks.pretraining.variants import VARIANTS

B, H, T, D = 2, 3, 5, 4
NAMES = {"one": "one-added", "key": "own-key", "hidden": "first-hidden"}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Block(nn.Module):
    """What transformers hands to an attention: here all it knows is the head's own key."""

    def __init__(self, sink: str) -> None:
        super().__init__()
        if sink == "key":
            self.sink_key = nn.Parameter(drawn(H * D, seed=4))


def attend(sink: str, block: Block, heads: list[Tensor], mask: Tensor | None, **more: Any) -> tuple[Tensor, Any]:
    attention = attend_past_the_first if sink == "hidden" else attend_with_a_place_for_nothing
    return attention(block, *heads, mask, **more)


def seen(masked: bool) -> Tensor:
    """Return who sees whom in two texts, causal; ``masked``: the second is without its last two tokens."""
    result = torch.ones(T, T, dtype=torch.bool).tril().repeat(B, 1, 1, 1)
    if masked:
        result[1, :, :, 3:] = False
    return result


def written_out(sink: str, block: Block, heads: list[Tensor], visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return what is gathered ``(B, T, H, D)`` and the weights ``(B, H, T, T)``, query by query."""
    query, key, value = heads
    weights = torch.zeros(B, H, T, T, dtype=query.dtype)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        q = scale * query[b, h, t]
        places = [s for s in range(T) if visible[b, 0, t, s] and (sink != "hidden" or s > 0 or t == 0)]
        sizes = {s: (q @ key[b, h, s]).exp() for s in places}
        nothing = {"one": 1.0, "hidden": 0.0}.get(sink)
        if nothing is None:
            nothing = (q @ block.sink_key[h * D : (h + 1) * D]).exp()
        for s in places:
            weights[b, h, t, s] = sizes[s] / (nothing + sum(sizes.values()))
    return (weights @ value).transpose(1, 2), weights


@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sink", SINKS)
def test_it_is_the_formula_with_gradients_and_without(sink: str, masked: bool, scaling: float | None) -> None:
    block, heads = Block(sink), list(drawn(3, B, H, T, D))
    expected, weights = written_out(sink, block, heads, seen(masked), scaling or 1 / math.sqrt(D))
    mask = seen(masked) if masked else None
    gathered, none = attend(sink, block, heads, mask, scaling=scaling)
    torch.testing.assert_close(gathered, expected)
    assert none is None
    with torch.no_grad():
        result, actual = attend(sink, block, heads, mask, scaling=scaling)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)  # the weights are in single precision
    torch.testing.assert_close(actual, weights.float())
    if sink == "hidden":
        torch.testing.assert_close(actual.sum(-1), torch.ones(B, H, T))
        assert not actual[..., 1:, 0].any()
    else:
        assert (actual.sum(-1) < 1).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sink", SINKS)
def test_its_gradients_are_those_of_the_formula(sink: str, masked: bool) -> None:
    actual = []
    for method in ("ours", "written out"):
        block, heads = Block(sink), [item.requires_grad_() for item in drawn(3, B, H, T, D).unbind()]
        if method == "ours":
            gathered, _ = attend(sink, block, heads, seen(masked) if masked else None)
        else:
            gathered, _ = written_out(sink, block, heads, seen(masked), 1 / math.sqrt(D))
        (gathered * drawn(B, T, H, D, seed=1)).sum().backward()
        actual.append([item.grad for item in (*heads, *block.parameters())])
    assert len(actual[0]) == (4 if sink == "key" else 3)
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("sink", SINKS)
def test_a_model_trains_and_is_read_with_the_same_attention(sink: str) -> None:
    size = Size(blocks=2, width=64, vocab=320, length=32)
    backbone, plain = (language_model(VARIANTS[name], size).backbone.eval() for name in (NAMES[sink], "base"))
    ids = torch.randint(4, size.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    trained = backbone(input_ids=ids).last_hidden_state
    with torch.no_grad():
        result = backbone(input_ids=ids, output_attentions=True)
        torch.testing.assert_close(trained, result.last_hidden_state)
        assert not torch.allclose(trained, plain(input_ids=ids).last_hidden_state)
    assert len(result.attentions) == 2
    complete = [torch.allclose(weights.sum(-1), torch.ones(())) for weights in result.attentions]
    assert complete == [sink == "hidden"] * 2


def test_own_keys_begin_as_a_one_added_learn_and_do_not_decay() -> None:
    size = Size(blocks=2, width=64, vocab=320, length=32)
    own_values, first = (language_model(VARIANTS[name], size) for name in ("own-key", "one-added"))
    windows = torch.randint(4, size.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = own_values(windows[:, :-1], windows[:, 1:])
    torch.testing.assert_close(loss, first(windows[:, :-1], windows[:, 1:]))
    loss.backward()
    keys = [block.self_attn.sink_key for block in own_values.backbone.layers]
    assert all(key.grad.abs().sum() > 0 for key in keys)
    groups = adamw(own_values, peak=1e-3, steps=10, warmup=1)["optimizer"].param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert {decays[id(key)] for key in keys} == {0.0}


def test_a_text_of_the_first_token_alone_is_read_beside_a_longer_one() -> None:
    backbone = language_model(VARIANTS["first-hidden"], Size(blocks=2, width=64, vocab=320, length=32)).backbone.eval()
    ids, mask = torch.tensor([[3, 7, 8], [3, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    with torch.no_grad():
        combined = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(combined[1, :1], backbone(input_ids=ids[1:, :1]).last_hidden_state[0])


@pytest.mark.parametrize("sink", SINKS)
def test_a_measurement_in_bfloat16_has_the_weights_of_unrounded_products(sink: str) -> None:
    heads = [8 * drawn(B, H, T, D, seed=seed).bfloat16() for seed in range(3)]  # products of some hundreds
    block = Block(sink).bfloat16().double()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, weights = attend(sink, block, heads, None)
    _, expected = written_out(sink, block, [head.double() for head in heads], seen(masked=False), D**-0.5)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-3, atol=1e-5)
