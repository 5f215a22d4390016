"""A plain folder contains the older names beside the newer ones, or older releases refuse to load it.

``tests/export/test_older_releases.py`` loads such folders with the older releases.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoConfig, LlamaConfig, LlamaModel

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.older_versions import make_readable_by_older
from tests.families import tiny
from tests.tiny_folders import TEXTS, tokenizer

Folder = Callable[[str], str]

OLDER = "sentence_transformers.models."
CENTER_TEXTS = tuple(f"text number {n} of {n * n}" for n in range(16))


def read_json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def module_types(folder: Path) -> list[str]:
    return [entry["type"] for entry in read_json(folder, "modules.json")]


def test_folder_has_the_older_and_the_newer_names(tiny_folder: Folder, tmp_path: Path) -> None:
    options: Any = {"pooling": "last", "center": CENTER_TEXTS, "normalize": True, "max_length": 40}
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", **options)
    encoder.save_pretrained(str(tmp_path))
    assert module_types(tmp_path) == [OLDER + name for name in ("Transformer", "Pooling", "Dense", "Normalize")]
    assert read_json(tmp_path, "sentence_bert_config.json") == {"max_seq_length": 40, "do_lower_case": False}
    pooling = read_json(tmp_path, "1_Pooling/config.json")
    assert pooling["pooling_mode"] == "lasttoken"
    assert [name for name, value in pooling.items() if value is True] == ["pooling_mode_lasttoken", "include_prompt"]
    assert pooling["word_embedding_dimension"] == 32
    assert set(read_json(tmp_path, "2_Dense/config.json")) == {
        "in_features",
        "out_features",
        "bias",
        "activation_function",
    }
    new_weights, old_weights = (
        load_file(tmp_path / "2_Dense/model.safetensors"),
        torch.load(tmp_path / "2_Dense/pytorch_model.bin"),
    )
    assert all(torch.equal(new_weights[name], old_weights[name]) for name in new_weights)
    assert read_json(tmp_path, "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"
    loaded = SentenceTransformer(str(tmp_path), device="cpu")
    assert loaded.max_seq_length == 40
    np.testing.assert_array_equal(loaded.encode(TEXTS), encoder.encode(TEXTS))


@pytest.mark.parametrize(
    ("name", "layer", "options"),
    [
        ("Llama", 2, {"norm": "none"}),
        ("Llama", 2, {"bidirectional": True}),
        ("Llama", 2, {"truncate_dim": 8}),
        ("Qwen3", 2, {}),  # a sliding window in some blocks
        ("CLIPText", 2, {}),
        ("ViT", 2, {}),
    ],
)
def test_older_releases_do_not_load_folders_they_would_misread(
    tiny_folder: Folder, tmp_path: Path, name: str, layer: Any, options: Any
) -> None:
    LayerEncoder(tiny_folder(name), layer, device="cpu", **options).save_pretrained(str(tmp_path))
    assert not any(name.startswith(OLDER) for name in module_types(tmp_path))


@pytest.mark.parametrize(("max_length", "is_rewritten"), [(16, True), (17, False)])
def test_sliding_window_matters_only_to_longer_texts(
    tiny_folder: Folder, tmp_path: Path, max_length: int, is_rewritten: bool
) -> None:
    folder = shutil.copytree(tiny_folder("Mistral"), tmp_path / "whole")
    (folder / "config.json").write_text(json.dumps({**read_json(folder, "config.json"), "sliding_window": 16}))
    LayerEncoder(str(folder), 2, device="cpu", max_length=max_length).save_pretrained(str(tmp_path / "cut"))
    assert module_types(tmp_path / "cut")[0].startswith(OLDER) == is_rewritten


def test_pooling_that_leaves_out_prompts_stays_so(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = [Transformer(tiny_folder("RoBERTa")), Pooling(32, "mean", include_prompt=False)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "whole"), create_model_card=False)
    LayerEncoder(str(tmp_path / "whole"), 2, device="cpu").save_pretrained(str(tmp_path / "cut"))
    assert read_json(tmp_path / "cut", "1_Pooling/config.json")["include_prompt"] is False
    assert read_json(tmp_path / "cut", "config.json")["position_embedding_type"] == "absolute"  # vLLM requires it


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}),
        (
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_rotary_positions_are_written_under_both_names_and_read_once(tmp_path: Path, rope: Any, older: Any) -> None:
    sizes: Any = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, intermediate_size=64, max_position_embeddings=64, pad_token_id=0, rope_parameters=rope
    )
    LlamaModel(config).eval().save_pretrained(tmp_path / "whole")
    tokenizer().save_pretrained(tmp_path / "whole")
    LayerEncoder(str(tmp_path / "whole"), 2, device="cpu").save_pretrained(str(tmp_path / "cut"))
    config_json = read_json(tmp_path / "cut", "config.json")
    assert {name: config_json[name] for name in older} == older
    assert (config_json["torch_dtype"], config_json["dtype"]) == ("float32", "float32")
    reloaded: Any = AutoConfig.from_pretrained(tmp_path / "cut")
    assert {name: reloaded.rope_parameters[name] for name in rope} == rope


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("GPTNeoX", {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
        ("ModernBERT", {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}),
    ],
)
def test_families_with_their_own_older_names(tiny_folder: Folder, tmp_path: Path, name: str, older: Any) -> None:
    LayerEncoder(tiny_folder(name), 2, device="cpu").save_pretrained(str(tmp_path))
    config_json = read_json(tmp_path, "config.json")
    assert {name: config_json[name] for name in older} == older


@pytest.mark.parametrize(("part", "joined"), [("a", True), (" ", False)])
def test_merges_are_strings_unless_a_part_contains_a_space(tmp_path: Path, part: str, joined: bool) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": 0, part: 1, "b": 2, part + "b": 3}
    bpe = Tokenizer(models.BPE(vocabulary, [(part, "b")]))
    tiny("Llama").save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="[PAD]").save_pretrained(tmp_path / "whole")
    LayerEncoder(str(tmp_path / "whole"), 1, device="cpu").save_pretrained(str(tmp_path / "cut"))
    (merge,) = read_json(tmp_path / "cut", "tokenizer.json")["model"]["merges"]
    assert merge == ("a b" if joined else [" ", "b"])
    assert Tokenizer.from_file(str(tmp_path / "cut" / "tokenizer.json")).encode(part + "b").ids == [3]


def test_folder_is_rewritten_once(tiny_folder: Folder, tmp_path: Path) -> None:
    LayerEncoder(tiny_folder("BERT"), 2, device="cpu").save_pretrained(str(tmp_path))
    assert not make_readable_by_older(tmp_path, 64)
