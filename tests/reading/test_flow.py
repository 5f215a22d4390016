"""Batches on their way through a model: quick inputs and passes without a mask give what the slow ones give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast

from midlayer_encoders import LayerEncoder
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.batches import TextInputs, batches_of, count_tokens
from midlayer_encoders.reading.causal import causal_attention, mask_is_needless, padded_right
from midlayer_encoders.reading.reader import layer_reader
from tests.families import inputs, tiny
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
LONG = [*TEXTS, "x" * 90, "a b", " the end "]  # one is truncated, at 64 tokens


# --- the mask --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        *[(name, True) for name in ("Llama", "Gemma2", "Qwen3", "GPT2", "GPTNeoX", "OPT", "Mamba")],
        *[(name, False) for name in ("BERT", "ModernBERT", "T5", "DeBERTaV2", "ALBERT")],
    ],
)
def test_a_mask_is_needless_where_nothing_after_a_token_reaches_it(name: str, causal: bool) -> None:
    model, given = tiny(name), inputs(name)
    assert padded_right(given)
    assert mask_is_needless(model, find_anatomy(model), given) is causal


def test_a_model_whose_causal_mask_is_off_needs_its_mask() -> None:
    model, given = tiny("Llama"), inputs("Llama")
    assert mask_is_needless(model, find_anatomy(model), given)
    model.config.is_causal = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    assert not mask_is_needless(model, find_anatomy(model), given)


def test_only_ids_padded_on_the_right_go_without_a_mask() -> None:
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert padded_right({"input_ids": ids, "attention_mask": mask})
    assert not padded_right({"input_ids": ids, "attention_mask": mask.flip(1)})
    assert not padded_right({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])})
    assert not padded_right({"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])})
    assert not padded_right({"input_ids": ids, "attention_mask": mask, "token_type_ids": ids})
    assert not padded_right({"pixel_values": ids})


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "BERT"])
def test_vectors_are_the_same_without_a_needless_mask(name: str, pooling: Any, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, pooling=pooling, device="cpu")
    masked: list[bool] = []
    hook = encoder.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: masked.append("attention_mask" in kwargs), with_kwargs=True
    )
    reader, batches = layer_reader(encoder), [[0, 1, 2], [3, 4, 5, 6]]
    expected = replace(reader, unmasked=False).vectors(LONG[:7], batches)
    assert all(masked)
    masked.clear()
    found = reader.vectors(LONG[:7], batches)
    hook.remove()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert masked[-2:] == [name == "BERT"] * 2, "of both batches, after the passes that tried it"


class Keys(TorchFunctionMode):
    """Notes how many keys each call of torch's attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is attention:
            self.seen.append(args[1].shape[-2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "blocks"), [(31, [31]), (33, [32, 33]), (70, [32, 64, 70])])
def test_on_a_cpu_tokens_attend_in_blocks_to_what_is_before_them(length: int, blocks: list[int]) -> None:
    draw = torch.Generator().manual_seed(length)
    given = [torch.randn(2, heads, length, 8, generator=draw) for heads in (4, 2, 2)]
    options: dict[str, Any] = {"scale": 0.3, "enable_gqa": True}
    later = torch.ones(length, length, dtype=torch.bool).tril()
    expected = [attention(*given, attn_mask=mask, **options) for mask in (later, None, later)]
    with Keys() as keys, causal_attention(torch.device("cpu")):
        causal = attention(*given, is_causal=True, **options)
        others = [attention(*given, attn_mask=mask, **options) for mask in (None, later)]
    assert keys.seen == [*blocks, length, length], "and what is not plainly causal attends as ever"
    torch.testing.assert_close([causal, *others], expected)


# --- texts to ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("prompt", ["", "query: "])
@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_quick_inputs_are_those_of_the_encoder(name: str, prompt: str, side: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    encoder.tokenizer.padding_side = side
    quick = TextInputs(encoder.tokenizer, partial(encoder.host_inputs, prompt=prompt or None), prompt)
    for batch in ([LONG[6], LONG[0]], LONG, LONG[:1], ["", "  ", "a"], ["", ""]):
        plain = encoder.host_inputs(batch, prompt=prompt or None)
        made = quick(batch)
        assert made.keys() == plain.keys()
        for key, value in plain.items():
            assert made[key].dtype == value.dtype
            assert torch.equal(made[key], value), key
    assert quick.trusted
    encoder.max_seq_length = 20  # as it is now, not as it was
    assert quick(LONG)["input_ids"].shape == (len(LONG), 20)
    encoder.max_seq_length = 64


class Reversing(PreTrainedTokenizerFast):
    """A tokenizer that does more than its Rust part."""

    def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._encode_plus(*args, **kwargs)
        made["input_ids"] = made["input_ids"].flip(1) if torch.is_tensor(made["input_ids"]) else made["input_ids"][:1]
        return made


def test_a_tokenizer_that_does_more_is_asked_itself(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    before = count_tokens(encoder, LONG)
    encoder.tokenizer.__class__ = Reversing
    quick = TextInputs(encoder.tokenizer, encoder.host_inputs)
    for batch in (LONG[:2], LONG[2:4]):
        assert torch.equal(quick(batch)["input_ids"], encoder.host_inputs(batch)["input_ids"])
    assert quick.trusted is False
    assert count_tokens(encoder, LONG) == before[:1]


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_counts_are_those_of_the_tokenizer(name: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    counts = [len(encoder.tokenizer(text, truncation=True)["input_ids"]) for text in LONG]
    assert count_tokens(encoder, LONG) == counts
    assert max(counts) == 64


# --- order -----------------------------------------------------------------------------------------------------------


def test_batches_come_in_their_order_with_their_own_vectors(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    texts = [f"{LONG[number % 9]} {number}" for number in range(24)]
    batches = batches_of(encoder, texts, token_budget=120)
    reader = layer_reader(encoder)
    assert [passed.positions for passed in reader.passes(texts, batches)] == batches
    whole = reader.vectors(texts, batches)
    alone = torch.stack([reader.vectors([text], [[0]])[:, 0] for text in texts], dim=1)
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(whole, reader.vectors(texts, batches)), "to the last bit"
