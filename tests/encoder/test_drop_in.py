"""LayerEncoder takes the keywords and calls of SentenceTransformer, with their meaning."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SimilarityFunction

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.options import EncoderOptions, make_options, python_line, shell_line
from midlayer_encoders.errors import ModelNotFoundError, OptionError
from tests.support.tiny_folders import TEXTS, Folder


def both(folder: str, **keywords: Any) -> tuple[LayerEncoder, SentenceTransformer]:
    keywords = {"device": "cpu", **keywords}
    return LayerEncoder(folder, -1, **keywords), SentenceTransformer(folder, **keywords)


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "model")
    LayerEncoder(tiny_folder("BERT"), 3, device="cpu").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "keywords",
    [
        {"model_kwargs": {"dtype": torch.bfloat16}},
        {"model_kwargs": {"torch_dtype": "float64", "attn_implementation": "eager"}},
        {"config_kwargs": {"hidden_act": "relu"}},
        {"config_kwargs": {"num_hidden_layers": 1}},
        {"processor_kwargs": {"model_max_length": 7}},
        {"model_kwargs": {"device_map": {"": "cpu"}}, "device": None, "modules": None, "model_card_data": None},
        {"similarity_fn_name": SimilarityFunction.EUCLIDEAN, "truncate_dim": 6, "backend": "torch"},
        {"local_files_only": True, "token": False, "cache_folder": "nowhere", "prompts": {"query": "find: "}},
    ],
)
def test_keywords_mean_the_same(keywords: dict[str, Any], folder: str) -> None:
    encoder, plain = both(folder, **keywords)
    np.testing.assert_array_equal(encoder.encode(TEXTS), plain.encode(TEXTS))
    assert encoder.dtype == plain.dtype
    assert encoder.max_seq_length == plain.max_seq_length
    assert encoder.similarity_fn_name == plain.similarity_fn_name
    config, plain_config = encoder.transformer.config, plain.transformers_model.config  # type: ignore[union-attr]
    assert config._attn_implementation == plain_config._attn_implementation


def test_other_names_of_the_arguments(folder: str) -> None:
    expected = LayerEncoder(folder, 2, max_length=9, device="cpu")
    encoder = LayerEncoder(model_name_or_path=folder, layer=2, max_seq_length=9, device="cpu")
    assert encoder.spec == expected.spec
    encoder = LayerEncoder(folder, 2, tokenizer_kwargs={"model_max_length": 9}, device="cpu")
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected.encode(TEXTS))
    options = {"use_auth_token": "secret", "device_map": {"": torch.device("cpu")}}
    assert make_options(options) == EncoderOptions(token="secret", device_map="cpu")
    assert make_options({"model_kwargs": {"device_map": {"": 1}}}).device_map == "cuda:1"
    assert LayerEncoder(folder, 2, attn_implementation="eager").transformer.config._attn_implementation == "eager"
    for keywords, match in (
        ({"max_length": 9, "max_seq_length": 8}, "`max_seq_length` cannot be combined with `max_length`"),
        ({"dtype": "float32", "model_kwargs": {"dtype": "float16"}}, "`dtype` cannot be combined with `dtype`"),
        ({"backend": "onnx"}, "`backend` must be one of 'torch', but got 'onnx'"),
        ({"model_kwargs": "float16"}, "`model_kwargs` must be a dict of keywords"),
        ({"token": 3}, "`token` must be a token or True, but got a int"),
        ({"modules": []}, r"`modules` does not apply .* LayerEncoder\.from_module"),
        ({"model_card_data": {}}, r"`model_card_data` does not apply .* encoder\.model_card_data\.language = "),
        ({"device_map": {"embeddings": 0}}, "`device_map` must be 'auto', a device, or {'': device} for an encoder"),
        ({"model_name_or_path": folder}, "`model_name_or_path` cannot be combined with `model`"),
    ):
        with pytest.raises(OptionError, match=match):
            LayerEncoder(folder, 2, **keywords)


def test_load_returns_an_encoder_of_the_last_layer(folder: str) -> None:
    encoder = LayerEncoder.load(folder)
    assert isinstance(encoder, LayerEncoder)
    np.testing.assert_array_equal(encoder.encode(TEXTS), SentenceTransformer(folder).encode(TEXTS))


def test_lists_of_two_are_pairs(folder: str) -> None:
    encoder, plain = both(folder)
    pairs = [["a cat", "a mat"], ["shares", "fell"], ["one", "two"]]
    np.testing.assert_array_equal(encoder.encode(pairs), plain.encode(pairs))
    np.testing.assert_array_equal(encoder.encode(pairs), encoder.encode([(one, two) for one, two in pairs]))


def test_files_come_from_the_cache_folder(folder: str, tmp_path: Path) -> None:
    commit = "0" * 40
    home = tmp_path / "cache" / "models--org--tiny"
    shutil.copytree(folder, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    options: dict[str, Any] = {"cache_folder": tmp_path / "cache", "local_files_only": True}
    encoder = LayerEncoder("org/tiny", 2, device="cpu", **options)
    np.testing.assert_array_equal(encoder.encode(TEXTS), LayerEncoder(folder, 2, device="cpu").encode(TEXTS))
    for cache_folder in (None, str(tmp_path)):
        with pytest.raises(ModelNotFoundError, match=r"is not cached .* \(`local_files_only` is True\)"):
            LayerEncoder("org/tiny", 2, cache_folder=cache_folder, local_files_only=True)


def test_printed_lines_recreate_the_encoder_and_hide_the_token() -> None:
    options = EncoderOptions(config_kwargs={"hidden_act": "relu"}, token="secret", cache_folder="c", dense="drop")
    assert (
        python_line("m", 2, options) == "LayerEncoder('m', layer=2, dense='drop', config_kwargs={'hidden_act': 'relu'})"
    )
    assert "secret" not in repr(options)
    with pytest.raises(OptionError, match="`config_kwargs` cannot be written as a command"):
        shell_line("m", 2, options, out="o")
    options = EncoderOptions(dense="keep", similarity_fn_name="dot", normalize=False, attn_implementation="eager")
    assert shell_line("m", 2, options, out="o") == (
        "midlayer export m --layer 2 --no-normalize --dense keep --similarity dot --attn-implementation eager --out o"
    )


def test_settings_saved_for_the_model_apply(folder: str, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    settings = {"max_seq_length": 20, "model_args": {"torch_dtype": "float64"}, "config_args": {"hidden_act": "relu"}}
    (path / "sentence_bert_config.json").write_text(json.dumps(settings))
    encoder, plain = both(str(path))
    assert encoder.dtype == plain.dtype == torch.float64
    np.testing.assert_array_equal(encoder.encode(TEXTS), plain.encode(TEXTS))


@pytest.mark.parametrize(
    ("file", "content", "remedy"),
    [
        (
            "config_sentence_transformers.json",
            {"__version__": {}, "requirements": {"torch": ">=999"}},
            "pip install -U",
        ),
        ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "own.Module"}], "trust_remote_code=True"),
    ],
)
def test_remedies_of_sentence_transformers_are_the_only_ones(
    file: str, content: Any, remedy: str, folder: str, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    if file == "modules.json":
        content = [*json.loads((path / file).read_text()), {**content[0], "idx": 2, "name": "2"}]
    (path / file).write_text(json.dumps(content))
    with pytest.raises((ImportError, ValueError), match=remedy):
        SentenceTransformer(str(path))
    with pytest.raises(ModelNotFoundError, match=remedy) as error:
        LayerEncoder(str(path), -1)
    assert "Correct its" not in str(error.value)
