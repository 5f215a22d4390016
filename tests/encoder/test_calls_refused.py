"""Invalid lengths, devices, batch sizes and processors raise this package's errors, however they are passed."""

import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

from midlayer_encoders import LayerEncoder, select_layer
from midlayer_encoders.errors import DeviceError, OptionError
from tests.support.families import VOCAB, tiny
from tests.support.made_media import IMAGES
from tests.support.tiny_folders import TEXTS, Folder, processor, tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 66, "pad_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("value", [None, -3, 0, "x", 2.5, 10**30])
def test_invalid_max_seq_length_is_refused_on_assignment(value: Any, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 1, device="cpu")
    before = encoder.max_seq_length
    with pytest.raises(OptionError, match="`max_seq_length` must be a positive number of tokens, but got"):
        encoder.max_seq_length = value
    assert encoder.max_seq_length == before
    encoder.max_seq_length = 4
    assert encoder.preprocess(TEXTS)["input_ids"].shape[1] == 4


def test_max_seq_length_without_effect_is_refused(tiny_folder: Folder) -> None:
    in_memory = LayerEncoder.from_module(tiny("Llama"), 1, processor=tokenizer(), medium="text", device="cpu")
    for encoder in (LayerEncoder(tiny_folder("ViT"), 1, device="cpu"), in_memory):
        with pytest.raises(OptionError, match="`max_seq_length` must be left alone for"):
            encoder.max_seq_length = 5


def test_max_seq_length_of_a_repeated_text_is_set_by_the_constructor(
    tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder("Llama")
    encoder = LayerEncoder(folder, 1, device="cpu", template="{text}-{text}", max_length=15)
    with pytest.raises(OptionError, match=r"because both copies have to fit. Write LayerEncoder\(.*max_length=21\)"):
        encoder.max_seq_length = 21
    assert encoder.preprocess(["abcdefghijklmno"])["input_ids"].shape[1] == 31
    assert "truncated" not in caplog.text  # 15 tokens fit twice
    assert encoder.preprocess(["abcdefghijklmnop"])["input_ids"].shape[1] == 31
    assert "A text of 16 tokens is truncated to 15 ('abcdefghijklmnop'…)" in caplog.text
    longer = LayerEncoder(folder, 1, device="cpu", template="{text}-{text}", max_length=15)
    longer.preprocess(["short", "x" * 500])
    assert "A text of 500 tokens is truncated to 15 ('xxxx" in caplog.text


def test_characters_that_are_removed_from_a_repeated_text_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A repeated text is limited to eight characters for each token that fits, and longer tokens exist."""
    long_word = "internationalization"
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "-", long_word, *string.ascii_letters])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    tf.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, **names).save_pretrained(tmp_path)
    tf.LlamaModel(tf.LlamaConfig(**_SIZES)).save_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 1, device="cpu", template="{text}-{text}", max_length=4)
    encoder.preprocess(["a b c d", long_word])
    assert "truncated" not in caplog.text
    kept = encoder.preprocess(["a b c", f"{long_word} " * 4])["input_ids"][1].tolist()
    assert kept == [3, 1, 2, 3, 1, 0, 0], "32 of 83 characters"
    assert "A text of 4 tokens is truncated to 2 ('internationalization" in caplog.text


@pytest.mark.parametrize(
    ("family", "extra_config", "max_tokens"),
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
def test_position_offsets_leave_room_for_fewer_tokens(
    family: str, extra_config: dict[str, Any], max_tokens: int, tmp_path: Path
) -> None:
    model = getattr(tf, f"{family}Model")(getattr(tf, f"{family}Config")(**_SIZES, **extra_config))
    model.save_pretrained(tmp_path)
    fast_tokenizer = tokenizer()
    fast_tokenizer.model_max_length = 512
    fast_tokenizer.save_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 1, device="cpu")
    assert encoder.max_seq_length == max_tokens
    assert np.isfinite(encoder.encode("a" * 200)).all()
    with pytest.raises(OptionError, match=f"`max_seq_length` must be at most {max_tokens}, the positions that"):
        encoder.max_seq_length = max_tokens + 1
    with pytest.raises(OptionError, match=f"`max_length` must be at most {max_tokens}, the positions that"):
        LayerEncoder(str(tmp_path), 1, device="cpu", max_length=max_tokens + 1)


def test_invalid_encode_arguments_are_refused_by_name_and_by_position(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 1, device="cpu")
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((None, None, 0), {}, "`batch_size` must be a positive number of inputs, but got 0"),
        ((), {"batch_size": None}, "`batch_size` must be a positive number of inputs, but got None"),
        ((), {"truncate_dim": 0}, "`truncate_dim` must be a positive number of dimensions, but got 0"),
        ((), {"device": "banana"}, "`device` must be one of cpu.* but got 'banana'"),
        ((), {"device": ["cpu", "cuda:99"]}, "`device` must be one of cpu.* but got 'cuda:99'"),
        ((), {"device": 5}, "`device` must be a device such as 'cpu' or 'cuda:1', but got 5"),
    ]
    for args, kwargs, message in cases:
        with pytest.raises((OptionError, DeviceError), match=message):
            encoder.encode(TEXTS, *args, **kwargs)
    np.testing.assert_array_equal(
        encoder.encode(TEXTS, None, "q: ", 2, device=torch.device("cpu")),
        encoder.encode(TEXTS, prompt="q: ", batch_size=2),
    )


@pytest.mark.parametrize("model", [5, None, ["a"], torch.nn.Linear(2, 2)])
def test_select_layer_refuses_objects_that_are_not_models(model: Any) -> None:
    with pytest.raises(OptionError, match="`model` must be a folder, hub name, LayerEncoder or frame"):
        select_layer(model, TEXTS)


@pytest.mark.parametrize("output", [None, {}, {"pixel_values": None}, "text", [1.0]])
def test_processor_that_returns_no_tensor_is_refused(output: Any) -> None:
    with pytest.raises(OptionError, match="`processor` must return a tensor, or a mapping of tensors by the names"):
        LayerEncoder.from_module(tiny("ViT"), 1, processor=lambda _: output, device="cpu")


@pytest.mark.slow
def test_compiled_module_gives_the_same_encoder_as_the_module() -> None:
    model = tiny("ViT")
    eager, compiled = (
        LayerEncoder.from_module(module, 2, processor=processor("ViT"), device="cpu")
        for module in (model, torch.compile(model))
    )
    np.testing.assert_array_equal(eager.encode(IMAGES), compiled.encode(IMAGES))
    assert eager.spec == compiled.spec
