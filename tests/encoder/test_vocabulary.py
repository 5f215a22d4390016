"""Folders without a vocabulary, texts of unknown tokens, and configs that count too many blocks."""

import json
import shutil
from pathlib import Path

import pytest
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import ModelNotFoundError
from tests.support.families import tiny
from tests.support.tiny_folders import TEXTS, Folder, tokenizer


@pytest.mark.parametrize("family", ["BERT", "GPT2", "OPT", "T5"])
def test_folder_without_a_vocabulary_is_refused(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ModelNotFoundError, match=r"must hold the vocabulary of its tokenizer, but .* does not"):
        LayerEncoder(str(tmp_path), 2, device="cpu")


@pytest.mark.parametrize(("rows", "is_refused"), [(99 + 1024, False), (99 + 1025, True)])
def test_tokenizer_of_another_model_is_refused(rows: int, is_refused: bool, tmp_path: Path) -> None:
    """Embeddings without a token are common, because their number is rounded up."""
    config = tf.BertConfig(
        vocab_size=rows, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    tf.BertModel(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    if is_refused:
        with pytest.raises(ModelNotFoundError, match="its tokenizer has 99 tokens and the model 1,124 embeddings"):
            LayerEncoder(str(tmp_path), 1, device="cpu")
    else:
        assert LayerEncoder(str(tmp_path), 1, device="cpu").encode(TEXTS).shape == (len(TEXTS), 16)


def test_tiny_vocabulary_that_fits_its_model_is_read(tmp_path: Path) -> None:
    config = tf.BertConfig(vocab_size=6, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    tf.BertModel(config).save_pretrained(tmp_path)
    model = WordLevel({"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, "[BOS]": 3, "0": 4, "1": 5}, unk_token="[UNK]")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]", "bos_token": "[BOS]"}
    tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **names).save_pretrained(tmp_path)
    assert LayerEncoder(str(tmp_path), 1, device="cpu").tokenizer("1")["input_ids"] == [5]


@pytest.mark.parametrize("count", [10**7, 4097])
def test_config_that_counts_too_many_blocks_is_refused(count: int, tiny_folder: Folder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("Llama"), tmp_path / "deep")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = count
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match=f"`num_hidden_layers` in the config of .* but is {count:,}"):
        LayerEncoder(str(folder), 2, device="cpu")
