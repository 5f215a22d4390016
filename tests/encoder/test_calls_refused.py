"""Wrong lengths, devices, batch sizes and processors are refused in our words, however they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders.errors import DeviceError, OptionError
from tests.families import VOCAB, tiny
from tests.made_media import IMAGES
from tests.tiny_folders import TEXTS, processor, tokenizer

Folder = Callable[[str], str]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 66, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("value", [None, -3, 0, "x", 2.5, 10**30])
def test_a_length_that_is_none_is_refused_where_it_is_set(value: Any, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 1, device="cpu")
    before = encoder.max_seq_length
    with pytest.raises(OptionError, match="`max_seq_length` must be a positive number of tokens, but got"):
        encoder.max_seq_length = value
    assert encoder.max_seq_length == before
    encoder.max_seq_length = 4
    assert encoder.preprocess(TEXTS)["input_ids"].shape[1] == 4


def test_a_length_without_effect_is_refused(tiny_folder: Folder) -> None:
    in_memory = LayerEncoder.from_module(tiny("Llama"), 1, processor=tokenizer(), medium="text", device="cpu")
    for encoder in (LayerEncoder(tiny_folder("ViT"), 1, device="cpu"), in_memory):
        with pytest.raises(OptionError, match="`max_seq_length` must be left alone for"):
            encoder.max_seq_length = 5


@pytest.mark.parametrize(
    ("family", "more", "most"),
    [
        ("Roberta", {}, 64),
        ("XLMRoberta", {}, 64),
        ("Camembert", {}, 64),
        ("Data2VecText", {}, 64),
        ("IBert", {}, 64),
        ("Xmod", {"default_language": "en_XX"}, 64),
        ("Esm", {"position_embedding_type": "absolute", "mask_token_id": 4}, 64),
        ("Longformer", {"attention_window": 4}, 64),
        ("MPNet", {}, 64),
        ("Bert", {}, 66),
    ],
)
def test_positions_that_start_after_the_padding_leave_room_for_fewer_tokens(
    family: str, more: dict[str, Any], most: int, tmp_path: Path
) -> None:
    model = getattr(tf, f"{family}Model")(getattr(tf, f"{family}Config")(**_SIZES, **more))
    model.save_pretrained(tmp_path)
    made = tokenizer()
    made.model_max_length = 512
    made.save_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 1, device="cpu")
    assert encoder.max_seq_length == most
    assert np.isfinite(encoder.encode("a" * 200)).all()
    with pytest.raises(OptionError, match=f"`max_seq_length` must be at most {most}, the positions that"):
        encoder.max_seq_length = most + 1
    with pytest.raises(OptionError, match=f"`max_length` must be at most {most}, the positions that"):
        LayerEncoder(str(tmp_path), 1, device="cpu", max_length=most + 1)


def test_a_wrong_argument_of_encode_is_refused_by_name_and_by_position(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((None, None, 0), {}, "`batch_size` must be a positive number of inputs, but got 0"),
        ((), {"batch_size": None}, "`batch_size` must be a positive number of inputs, but got None"),
        ((), {"truncate_dim": 0}, "`truncate_dim` must be a positive number of dimensions, but got 0"),
        ((), {"device": "banana"}, "`device` must be one of cpu.* but got 'banana'"),
        ((), {"device": ["cpu", "cuda:99"]}, "`device` must be one of cpu.* but got 'cuda:99'"),
        ((), {"device": 5}, "`device` must be a device such as 'cpu' or 'cuda:1', but got 5"),
    ]
    for args, kwargs, message in wrong:
        with pytest.raises((OptionError, DeviceError), match=message):
            encoder.encode(TEXTS, *args, **kwargs)
    np.testing.assert_array_equal(
        encoder.encode(TEXTS, None, "q: ", 2, device=torch.device("cpu")),
        encoder.encode(TEXTS, prompt="q: ", batch_size=2),
    )


@pytest.mark.parametrize("model", [5, None, ["a"], torch.nn.Linear(2, 2)])
def test_a_layer_of_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(OptionError, match="`model` must be a folder, a hub name, a LayerEncoder or a frame"):
        select_layer(model, TEXTS)


@pytest.mark.parametrize("made", [None, {}, {"pixel_values": None}, "text", [1.0]])
def test_a_processor_that_returns_no_tensor_is_refused(made: Any) -> None:
    with pytest.raises(OptionError, match="`processor` must return a tensor, or a mapping of tensors by the names"):
        LayerEncoder.from_module(tiny("ViT"), 1, processor=lambda _: made, device="cpu")


@pytest.mark.slow
def test_a_compiled_module_is_read_as_the_module_itself() -> None:
    model = tiny("ViT")
    ours, theirs = (
        LayerEncoder.from_module(one, 2, processor=processor("ViT"), device="cpu")
        for one in (model, torch.compile(model))
    )
    np.testing.assert_array_equal(ours.encode(IMAGES), theirs.encode(IMAGES))
    assert ours.spec == theirs.spec
