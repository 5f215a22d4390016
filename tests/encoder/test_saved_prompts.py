"""Saved prompts are prepended as SentenceTransformer does, unless other prompts or a template are passed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from midlayer_encoders import LayerEncoder, Recipe, embed
from midlayer_encoders.encoder.options import EncoderOptions, shell_line
from midlayer_encoders.encoder.saved_folder import load_saved_folder
from midlayer_encoders.errors import ModelNotFoundError, OptionError
from midlayer_encoders.models.hub import Location
from tests.support.tiny_folders import TEXTS, Folder, save_tiny

PROMPTS = {"query": "find: ", "document": "a text: ", "STS": "alike? "}
TEMPLATE = 'say "{text}":'
QUERIES = Recipe(name="queries", template={"query": "Ask: {text}", "text": "Say: {text}"}, pooling="last")


def save_with_prompts(model: str, folder: Path, default: str | None = "STS", prompts: dict[str, str] = PROMPTS) -> str:
    """Write a folder as sentence-transformers does, with its prompts, and return the path."""
    first = Transformer(model)
    first.tokenizer.padding_side = "right"
    modules = [first, Pooling(first.get_embedding_dimension(), pooling_mode="mean")]
    plain = SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name=default, device="cpu")
    plain.save_pretrained(str(folder), create_model_card=False)
    return str(folder)


def load_last_layer(folder: str, **options: Any) -> LayerEncoder:
    return LayerEncoder(folder, -1, device="cpu", **options)


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_with_prompts(tiny_folder("Llama"), tmp_path_factory.mktemp("prompts") / "model")


@pytest.mark.parametrize(
    ("family", "default", "prompts"),
    [
        ("Llama", None, PROMPTS),
        ("BERT", "query", {"query": "find: ", "passage": "a text: "}),  # E5's names; documents have the empty one
    ],
)
def test_saved_prompts_match_sentence_transformers(
    family: str, default: str | None, prompts: dict[str, str], tiny_folder: Folder, tmp_path: Path
) -> None:
    path = save_with_prompts(tiny_folder(family), tmp_path / "model", default, prompts)
    encoder, plain = load_last_layer(path), SentenceTransformer(path, device="cpu")
    assert encoder.prompts == plain.prompts
    assert encoder.default_prompt_name == plain.default_prompt_name == default
    calls: list[Callable[[Any], Any]] = [
        lambda model, name=name: model.encode(TEXTS, prompt_name=name) for name in prompts
    ]
    calls += [
        lambda model: model.encode(TEXTS),
        lambda model: model.encode_query(TEXTS),
        lambda model: model.encode_document(TEXTS),
    ]
    for call in calls:
        np.testing.assert_allclose(call(encoder), call(plain), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_layers(TEXTS)[-1], plain.encode(TEXTS), atol=1e-5)


def test_passed_prompts_replace_the_saved_ones(folder: str, tiny_folder: Folder) -> None:
    bare = load_last_layer(tiny_folder("Llama"))
    assert load_last_layer(folder, prompts={"STS": "same? "}).prompts == {"query": "", "document": "", "STS": "same? "}
    without_prompts = load_last_layer(folder, prompts={})
    np.testing.assert_allclose(without_prompts.encode(TEXTS), bare.encode(TEXTS), atol=1e-5)
    assert shell_line("m", 1, without_prompts.options, out="o") == "midlayer export m --layer 1 --prompt query= --out o"
    assert load_last_layer(folder, prompts={"query": ""}).spec == without_prompts.spec
    with_document_prompt = load_last_layer(folder, default_prompt_name="document")
    np.testing.assert_array_equal(
        with_document_prompt.encode(TEXTS), with_document_prompt.encode(TEXTS, prompt="a text: ")
    )
    with pytest.raises(OptionError, match=r"saved with the model .*\(available: .*'query'.*\), but got 'qeury'"):
        load_last_layer(folder, default_prompt_name="qeury")
    with pytest.raises(OptionError, match=r"`default_prompt_name` must name one of `prompts`.*available: none"):
        load_last_layer(tiny_folder("Llama"), default_prompt_name="query")
    with pytest.raises(OptionError, match=r"must be None with prompts=\{\}"):
        load_last_layer(folder, prompts={}, default_prompt_name="query")


def test_template_replaces_the_saved_prompts(folder: str, tiny_folder: Folder) -> None:
    with_template = load_last_layer(tiny_folder("Llama"), template=TEMPLATE)
    encoder = load_last_layer(folder, template=TEMPLATE)
    np.testing.assert_allclose(encoder.encode(TEXTS), with_template.encode(TEXTS), atol=1e-5)
    assert encoder.prompts == with_template.prompts
    with_saved_prompts = load_last_layer(folder)
    assert not any(with_saved_prompts.with_recipe("one-word").prompts.values())
    assert with_saved_prompts.with_recipe("one-word").default_prompt == ""
    assert with_saved_prompts.with_recipe(QUERIES).prompts["query"] == "Ask: "
    assert with_saved_prompts.with_recipe("plain").prompts == with_saved_prompts.prompts
    np.testing.assert_array_equal(
        with_saved_prompts.with_recipe("plain").encode(TEXTS), with_saved_prompts.encode(TEXTS)
    )
    with pytest.raises(OptionError, match=r"nor a template is passed \(available: none\), but got 'query'"):
        load_last_layer(folder, template=TEMPLATE, default_prompt_name="query")


@pytest.mark.parametrize("options", [{}, {"recipe": QUERIES}])
def test_saved_prompts_round_trip(options: dict[str, Any], folder: str, tmp_path: Path) -> None:
    encoder = LayerEncoder(folder, 2, device="cpu", **options)
    assert any(encoder.prompts.values())
    assert encoder.default_prompt
    encoder.save_pretrained(str(tmp_path / "out"))
    reloaded = load_last_layer(str(tmp_path / "out"))
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert reloaded.prompts == plain.prompts == encoder.prompts
    assert reloaded.default_prompt_name == plain.default_prompt_name == encoder.default_prompt_name
    for loaded in (reloaded, plain):
        np.testing.assert_allclose(loaded.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)
        np.testing.assert_allclose(loaded.encode_query(TEXTS), encoder.encode_query(TEXTS), atol=1e-5)


def test_embed_uses_the_default_prompt(folder: str, tmp_path: Path) -> None:
    plain = SentenceTransformer(folder, device="cpu")
    for name, options in (("STS", {}), ("query", {"prompt_name": "query"})):
        path = embed(folder, TEXTS, tmp_path / f"{name}.npy", layers=[-1], device="cpu", **options)
        np.testing.assert_allclose(np.load(path)[0], plain.encode(TEXTS, prompt_name=name), atol=1e-5)


def test_folder_without_prompts_keeps_its_spec(tmp_path: Path) -> None:
    path = save_tiny("Llama", tmp_path / "model")
    spec = load_last_layer(path).spec
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    assert load_last_layer(path).spec == spec  # no modules.json: not a folder of sentence-transformers
    write_sentence_transformers_files(
        tmp_path / "model", prompts={"query": "", "document": ""}, default_prompt_name=None
    )
    assert load_last_layer(path).spec == spec
    write_sentence_transformers_files(tmp_path / "model", prompts=PROMPTS, model_type="CrossEncoder")
    assert load_last_layer(path).spec == spec
    write_sentence_transformers_files(tmp_path / "model", prompts=PROMPTS)
    assert load_last_layer(path).spec != spec
    assert load_last_layer(path, prompts={}).spec == spec


def write_sentence_transformers_files(folder: Path, **config: Any) -> None:
    """Write the files and settings of a sentence-transformers folder."""
    module = "sentence_transformers.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{module}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"prompts": ["a"]}, "must hold settings and modules that sentence-transformers can read"),
        ({"prompts": {"a": 1}}, "a prompt is not a string"),
        ({"prompts": {"a": "b: "}, "default_prompt_name": "c"}, "Default prompt name 'c' not found"),
    ],
)
def test_invalid_saved_prompts_are_refused(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    write_sentence_transformers_files(tmp_path, **config)
    with pytest.raises(ModelNotFoundError, match=match):
        load_saved_folder(Location(str(tmp_path)), EncoderOptions())


def test_image_model_ignores_saved_prompts(tmp_path: Path) -> None:
    path = save_tiny("ViT", tmp_path / "model")
    write_sentence_transformers_files(tmp_path / "model", prompts=PROMPTS, default_prompt_name="STS")
    assert load_last_layer(path).default_prompt == ""
