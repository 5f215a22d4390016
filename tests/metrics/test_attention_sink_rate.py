from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.metrics import (
    AttentionSinkRate,
    TooFewTextsError,
    attention_sink_rate,
    attention_sink_rates,
)


def rate_by_definition(attentions: Tensor, mask: Tensor, epsilon: float) -> float:
    """Share of heads ``(H, T, T)`` that on average give the first real token more than epsilon of their attention."""
    real = [int(token) for token in mask.nonzero()]
    scores = [sum(float(head[query, real[0]]) for query in real) / len(real) for head in attentions]
    return sum(score > epsilon for score in scores) / len(scores)


def batch(texts: int = 5, heads: int = 8, tokens: int = 6) -> tuple[Tensor, Tensor]:
    """Random weights, some heads with a sink, and a mask with padding on either side."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(texts, heads, tokens, tokens, generator=generator, dtype=torch.float64)
    logits[:, ::2, :, 0] += 2.0
    mask = torch.ones(texts, tokens, dtype=torch.bool)
    mask[1, 4:], mask[2, :2] = False, False
    return logits.masked_fill(~mask[:, None, None, :], -1e9).softmax(dim=-1), mask


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.3, 0.6])
def test_function_and_class_match_the_definition(epsilon: float) -> None:
    attentions, mask = batch()
    expected = [rate_by_definition(*text, epsilon) for text in zip(attentions, mask, strict=True)]
    assert attention_sink_rate(attentions, mask, epsilon=epsilon).tolist() == pytest.approx(expected)
    metric = AttentionSinkRate([3, 7], epsilon=epsilon)
    for part in torch.arange(5).split(2):
        metric.update(attentions[part], mask[part], layer=3)
        metric.update(attentions[part].flip(-1), mask[part].flip(-1), layer=7)
    flipped = [rate_by_definition(*text, epsilon) for text in zip(attentions.flip(-1), mask.flip(-1), strict=True)]
    assert metric.compute().tolist() == pytest.approx([sum(expected) / 5, sum(flipped) / 5])


def test_known_values() -> None:
    causal = torch.tril(torch.ones(3, 3)) / torch.arange(1, 4)[:, None]  # to the first: 1, 1/2, 1/3, on average 11/18
    heads = torch.stack([causal, torch.eye(3)])  # and 1/3
    assert attention_sink_rate(heads, epsilon=0.62) == 0.0
    assert attention_sink_rate(heads, epsilon=0.5) == 0.5
    assert attention_sink_rate(heads) == 1.0
    assert attention_sink_rate(heads[None].half()).dtype == torch.float32


def test_padding_is_ignored() -> None:
    attentions, mask = batch()
    padded = torch.full((5, 8, 9, 9), torch.nan, dtype=torch.float64)
    padded[:, :, 2:8, 2:8] = attentions
    longer = nn.functional.pad(mask, (2, 1))
    assert torch.equal(attention_sink_rate(padded, longer), attention_sink_rate(attentions, mask))


def test_text_without_tokens_is_skipped_and_nan_is_named() -> None:
    attentions, mask = batch()
    mask[3] = False
    assert attention_sink_rate(attentions, mask).isnan().tolist() == [False, False, False, True, False]
    metric = AttentionSinkRate([1])
    metric.update(attentions, mask, layer=1)
    assert (metric.skipped.tolist(), metric.count.tolist()) == ([1], [4])
    assert torch.isfinite(metric.compute()).all()
    attentions[0, 0, 0, 0] = torch.nan
    metric.update(attentions, mask, layer=1)
    with pytest.raises(NotFiniteError, match="AttentionSinkRate of layer 1"):
        metric.compute()
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(TooFewTextsError, match="at layer 1"):
        AttentionSinkRate([1]).compute()


def test_invalid_input_is_refused() -> None:
    attentions, mask = batch()
    with pytest.raises(OptionError, match=r"`epsilon` must be in \[0, 1\), but got 1"):
        AttentionSinkRate([0], epsilon=1.0)
    with pytest.raises(OptionError, match=r"must be \(\*, H, T, T\)"):
        attention_sink_rate(attentions[..., :3], mask)
    with pytest.raises(OptionError, match=r"of torch.int64"):
        AttentionSinkRate([0]).update(attentions, mask.long(), layer=0)


def model(kind: Any = tf.LlamaModel, attention: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    config = kind.config_class(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32, vocab_size=50
    )
    result: nn.Module = kind._from_config(config, attn_implementation=attention).eval()
    return result


@pytest.mark.parametrize("kind", [tf.LlamaModel, tf.GPTNeoXModel, tf.BertModel])
def test_rates_of_a_model_by_layer(kind: Any) -> None:
    item = model(kind)
    inputs = {"input_ids": torch.arange(12).reshape(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    inputs["attention_mask"][1, 4:] = 0
    with torch.no_grad():
        attentions = item(**inputs, output_attentions=True).attentions
    masks = inputs["attention_mask"].bool()
    expected = {
        layer: sum(rate_by_definition(*text, 0.2) for text in zip(weights, masks, strict=True)) / 2
        for layer, weights in enumerate(attentions, start=1)
    }
    assert attention_sink_rates(item, inputs, epsilon=0.2) == pytest.approx(expected)
    separate = {"input_ids": inputs["input_ids"][:1]}
    assert attention_sink_rates(item, separate) == attention_sink_rates(
        item, separate | {"attention_mask": torch.ones(1, 6)}
    )


def test_models_without_attention_weights_are_refused() -> None:
    inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    with pytest.raises(OptionError, match='load it with `attn_implementation="eager"`'):
        attention_sink_rates(model(attention="sdpa"), inputs)
    with pytest.raises(OptionError, match="must be in eval mode"):
        attention_sink_rates(model().train(), inputs)
