"""Unusual tokenizers, modules and weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder import saving
from midlayer_encoders.errors import NotFiniteError, OptionError
from tests.support.tiny_folders import TEXTS, Folder, tokenizer


def llama(vocab_size: int) -> tf.LlamaModel:
    config = tf.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    torch.manual_seed(0)
    return tf.LlamaModel(config).eval()


def gene_tokenizer() -> Any:
    letters = {"[PAD]": 0, "[EOS]": 1, "A": 2, "C": 3, "G": 4, "T": 5, "N": 6}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(letters, [])), pad_token="[PAD]", eos_token="[EOS]"
    )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_tokenizer_with_seven_tokens(bidirectional: bool, tmp_path: Path) -> None:
    """English texts produce no tokens, and few ids exist."""
    model = llama(8)
    model.save_pretrained(tmp_path / "model")
    gene_tokenizer().save_pretrained(tmp_path / "model")
    encoder = LayerEncoder(str(tmp_path / "model"), 2, norm="none", bidirectional=bidirectional, device="cpu")
    vectors = encoder.encode(["ACGT", "A"], show_progress_bar=False)
    assert vectors.shape == (2, 32)
    if not bidirectional:
        with torch.no_grad():
            expected = model(torch.tensor([[2, 3, 4, 5]]), output_hidden_states=True).hidden_states[2][0].mean(dim=0)
        np.testing.assert_allclose(vectors[0], expected.numpy(), atol=1e-5)
    encoder.save_pretrained(str(tmp_path / "out"))
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(plain.encode(["ACGT", "A"], show_progress_bar=False), vectors, atol=1e-5)


def test_module_in_memory_whose_tokenizer_pads_on_the_left() -> None:
    left_tokenizer = tokenizer()
    left_tokenizer.padding_side = "left"
    config = tf.GPT2Config(vocab_size=len(left_tokenizer), n_embd=32, n_layer=3, n_head=4)
    encoder = LayerEncoder.from_module(
        tf.GPT2Model(config).eval(), 2, processor=left_tokenizer, medium="text", device="cpu"
    )
    one_by_one = np.stack([encoder.encode(text, show_progress_bar=False) for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS, show_progress_bar=False), one_by_one, atol=1e-5)
    assert left_tokenizer.padding_side == "left"  # the caller's tokenizer is unchanged


def test_processor_without_an_attention_mask_is_refused() -> None:
    fast_tokenizer = tokenizer()

    def pad_without_mask(texts: list[str]) -> dict[str, torch.Tensor]:
        rows = [fast_tokenizer(text)["input_ids"] for text in texts]
        longest = max(map(len, rows))
        return {"input_ids": torch.tensor([row + [0] * (longest - len(row)) for row in rows])}

    config = tf.BertConfig(
        vocab_size=len(fast_tokenizer), hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(OptionError, match="`processor` must return an `attention_mask`"):
        LayerEncoder.from_module(
            tf.BertModel(config).eval(), 2, processor=pad_without_mask, medium="text", device="cpu"
        )


def test_left_padding_is_corrected(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("GPT2"), 2, device="cpu")
    expected = encoder.encode(TEXTS, show_progress_bar=False)
    encoder.tokenizer.padding_side = "left"
    np.testing.assert_array_equal(encoder.encode(TEXTS, show_progress_bar=False), expected)


def test_positions_that_depend_on_the_length_are_not_changed_by_padding(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 9.0, 9.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24, **factors}
    config = llama(len(tokenizer())).config
    config.rope_parameters = rope
    tf.LlamaModel(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    one_by_one = np.stack([encoder.encode(text) for text in TEXTS])  # of 5 to 32 tokens
    np.testing.assert_allclose(encoder.encode(TEXTS), one_by_one, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_layers(TEXTS, [2])[0], one_by_one, atol=1e-5)


def test_nonfinite_weights_error_names_the_layer(tmp_path: Path) -> None:
    model = llama(len(tokenizer()))
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert LayerEncoder(str(tmp_path), 1, device="cpu").encode(TEXTS, show_progress_bar=False).shape == (len(TEXTS), 32)
    with pytest.raises(NotFiniteError, match="Layer 2 of"):
        LayerEncoder(str(tmp_path), 2, device="cpu").encode(TEXTS, show_progress_bar=False)


def test_token_without_an_embedding_is_refused(tmp_path: Path) -> None:
    fast_tokenizer = tokenizer()
    llama(len(fast_tokenizer)).save_pretrained(tmp_path)
    fast_tokenizer.add_tokens(["zzz"])
    fast_tokenizer.save_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    assert encoder.encode(TEXTS[:1], show_progress_bar=False).shape == (1, 32)
    with pytest.raises(OptionError, match=r"makes the token 'zzz'.*resize_token_embeddings"):
        encoder.encode(["a zzz"], show_progress_bar=False)


def test_saved_folder_is_reloaded_even_if_nothing_was_encoded_before(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    class Recorded(SentenceTransformer):
        def __init__(self, path: str, **options: Any) -> None:
            loaded.append(path)
            super().__init__(path, **options)

    monkeypatch.setattr(saving, "SentenceTransformer", Recorded)
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    assert not any(module.training for module in encoder.modules())
    encoder.save_pretrained(str(tmp_path / "out"))
    assert len(loaded) == 1


def test_unknown_device_map_is_refused(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match="`device_map` must be one of 'auto'"):
        LayerEncoder(tiny_folder("Llama"), 2, device_map="banana")


def test_key_value_cache_is_off(tiny_folder: Folder) -> None:
    """Before transformers 5.18, a hybrid model cut before its first attention block fails with a cache."""
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    with torch.no_grad():
        assert encoder.transformer(torch.tensor([[5, 6]])).past_key_values is None


@pytest.mark.parametrize("norm", ["final", "none"])
def test_dimension_is_that_of_vectors_after_a_projection(norm: Any, tiny_folder: Folder) -> None:
    """OPT-350m projects its states to half of ``hidden_size``, which sentence-transformers takes for the dimension."""
    folder = tiny_folder("OPT-350m")
    cases: tuple[dict[str, Any], ...] = ({}, {"center": [f"{text} {number}" for number in range(3) for text in TEXTS]})
    for options in cases:
        encoder = LayerEncoder(folder, **{"layer": 2, "norm": norm, "device": "cpu", **options})
        assert encoder.encode(TEXTS).shape == (len(TEXTS), encoder.get_embedding_dimension())
    whole = LayerEncoder(folder, -1, norm=norm, device="cpu").with_recipe("one-word")
    assert whole.encode(TEXTS).shape[1] == whole.get_embedding_dimension()
