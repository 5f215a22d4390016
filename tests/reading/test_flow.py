"""Batches in a model: fast inputs and passes without a mask give the same as the slow ones."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from midlayer_encoders import LayerEncoder
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.reading.batches import TextInputs, batches_of, count_tokens
from midlayer_encoders.reading.causal import mask_is_needless, padded_right
from midlayer_encoders.reading.reader import layer_reader
from tests.support.families import inputs, tiny
from tests.support.tiny_folders import TEXTS, Folder

LONG = [*TEXTS, "x" * 90, "a b", " the end "]  # one is truncated to 64 tokens


# --- the mask --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        *[(name, True) for name in ("Llama", "Gemma2", "Qwen3", "GPT2", "GPTNeoX", "OPT", "Mamba")],
        *[(name, False) for name in ("BERT", "ModernBERT", "T5", "DeBERTaV2", "ALBERT")],
    ],
)
def test_mask_is_unnecessary_for_causal_models(name: str, causal: bool) -> None:
    model, passed = tiny(name), inputs(name)
    assert padded_right(passed)
    assert mask_is_needless(model, find_anatomy(model), passed) is causal


def test_bidirectional_model_needs_its_mask() -> None:
    model, passed = tiny("Llama"), inputs("Llama")
    assert mask_is_needless(model, find_anatomy(model), passed)
    model.config.is_causal = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    assert not mask_is_needless(model, find_anatomy(model), passed)


def test_only_right_padded_ids_need_no_mask() -> None:
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert padded_right({"input_ids": ids, "attention_mask": mask})
    assert not padded_right({"input_ids": ids, "attention_mask": mask.flip(1)})
    assert not padded_right({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])})
    assert not padded_right({"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1]])})
    assert not padded_right({"input_ids": ids, "attention_mask": mask, "token_type_ids": ids})
    assert not padded_right({"pixel_values": ids})


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "BERT"])
def test_vectors_are_the_same_without_an_unnecessary_mask(name: str, pooling: Any, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, pooling=pooling, device="cpu")
    masked: list[bool] = []
    hook = encoder.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: masked.append("attention_mask" in kwargs), with_kwargs=True
    )
    reader, batches = layer_reader(encoder), [[0, 1, 2], [3, 4, 5, 6]]
    expected = replace(reader, unmasked=False).vectors(LONG[:7], batches)
    assert all(masked)
    masked.clear()
    actual = reader.vectors(LONG[:7], batches)
    hook.remove()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert masked[-2:] == [name == "BERT"] * 2, "of both batches, after the passes that tried it"


# --- texts to ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("prompt", ["", "query: "])
@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_fast_inputs_match_the_encoder(name: str, prompt: str, side: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    encoder.tokenizer.padding_side = side
    quick = TextInputs(encoder.tokenizer, partial(encoder.host_inputs, prompt=prompt or None), prompt)
    for batch in ([LONG[6], LONG[0]], LONG, LONG[:1], ["", "  ", "a"], ["", ""]):
        plain = encoder.host_inputs(batch, prompt=prompt or None)
        result = quick(batch)
        assert result.keys() == plain.keys()
        for key, value in plain.items():
            assert result[key].dtype == value.dtype
            assert torch.equal(result[key], value), key
    assert quick.trusted
    encoder.max_seq_length = 20  # the current value is used
    assert quick(LONG)["input_ids"].shape == (len(LONG), 20)
    encoder.max_seq_length = 64


class Reversing(PreTrainedTokenizerFast):
    """A tokenizer with behavior beyond its Rust part."""

    def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._encode_plus(*args, **kwargs)
        result["input_ids"] = (
            result["input_ids"].flip(1) if torch.is_tensor(result["input_ids"]) else result["input_ids"][:1]
        )
        return result


def test_custom_tokenizer_is_called_itself(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    before = count_tokens(encoder, LONG)
    encoder.tokenizer.__class__ = Reversing
    quick = TextInputs(encoder.tokenizer, encoder.host_inputs)
    for batch in (LONG[:2], LONG[2:4]):
        assert torch.equal(quick(batch)["input_ids"], encoder.host_inputs(batch)["input_ids"])
    assert quick.trusted is False
    assert count_tokens(encoder, LONG) == before[:1]


def test_batches_of_media_are_small_and_count_states() -> None:
    module, host = torch.nn.Linear(1, 1), torch.device("cpu")
    images: Any = SimpleNamespace(media=["image"], transformer=module, name="m", device=host)
    batches = batches_of(images, [np.zeros((2, 2, 3))] * 70, token_budget=10**6)
    assert list(map(len, batches)) == [32, 32, 6]
    images.device = torch.device("cuda")
    assert list(map(len, batches_of(images, [np.zeros((2, 2, 3))] * 70, token_budget=10**6))) == [64, 6]
    audio: Any = SimpleNamespace(media=["audio"], transformer=module, name="m", sampling_rate=16000, device=host)
    waveforms = [(np.ones(length, dtype=np.float32), 16000) for length in (320, 321, 640)]
    assert batches_of(audio, waveforms, token_budget=3) == [[1], [2], [0]]  # one state, and two of each other
    assert batches_of(audio, waveforms, token_budget=4) == [[1, 2], [0]]


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_counts_match_the_tokenizer(name: str, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    counts = [len(encoder.tokenizer(text, truncation=True)["input_ids"]) for text in LONG]
    assert count_tokens(encoder, LONG) == counts
    assert max(counts) == 64


# --- order -----------------------------------------------------------------------------------------------------------


def test_batches_keep_their_order_and_vectors(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    texts = [f"{LONG[number % 9]} {number}" for number in range(24)]
    batches = batches_of(encoder, texts, token_budget=120)
    reader = layer_reader(encoder)
    assert [passed.positions for passed in reader.passes(texts, batches)] == batches
    complete = reader.vectors(texts, batches)
    stacked = torch.stack([reader.vectors([text], [[0]])[:, 0] for text in texts], dim=1)
    torch.testing.assert_close(complete, stacked, rtol=1e-4, atol=1e-5)
    assert torch.equal(complete, reader.vectors(texts, batches)), "to the last bit"
