"""Prompts that a folder keeps are put before texts as SentenceTransformer does, unless others, or a template, are given."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from midlayer_encoders import LayerEncoder, embed
from midlayer_encoders.encoder.options import shell_line
from midlayer_encoders.encoder.prompting import load_saved_prompts
from midlayer_encoders.errors import ModelNotFoundError, OptionError
from tests.tiny_folders import TEXTS, save_tiny

Folder = Callable[[str], str]
PROMPTS = {"query": "find: ", "document": "a text: ", "STS": "alike? "}
TEMPLATE = 'say "{text}":'


def kept(model: str, folder: Path, default: str | None = "STS", prompts: dict[str, str] = PROMPTS) -> str:
    """Write a folder as sentence-transformers does, with its prompts, and return the path."""
    first = Transformer(model)
    first.tokenizer.padding_side = "right"
    modules = [first, Pooling(first.get_embedding_dimension(), pooling_mode="mean")]
    plain = SentenceTransformer(modules=modules, prompts=prompts, default_prompt_name=default, device="cpu")
    plain.save_pretrained(str(folder), create_model_card=False)
    return str(folder)


def last(folder: str, **options: Any) -> LayerEncoder:
    return LayerEncoder(folder, -1, device="cpu", **options)


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> str:
    return kept(tiny_folder("Llama"), tmp_path_factory.mktemp("kept") / "model")


@pytest.mark.parametrize(
    ("family", "default", "prompts"),
    [
        ("Llama", None, PROMPTS),
        ("BERT", "query", {"query": "find: ", "passage": "a text: "}),  # E5's names; documents have the empty one
    ],
)
def test_every_prompt_gives_the_vectors_of_sentence_transformers(
    family: str, default: str | None, prompts: dict[str, str], tiny_folder: Folder, tmp_path: Path
) -> None:
    home = kept(tiny_folder(family), tmp_path / "model", default, prompts)
    encoder, plain = last(home), SentenceTransformer(home, device="cpu")
    assert encoder.prompts == plain.prompts
    assert encoder.default_prompt_name == plain.default_prompt_name == default
    calls: list[Callable[[Any], Any]] = [lambda one, name=name: one.encode(TEXTS, prompt_name=name) for name in prompts]
    calls += [
        lambda one: one.encode(TEXTS),
        lambda one: one.encode_query(TEXTS),
        lambda one: one.encode_document(TEXTS),
    ]
    for call in calls:
        np.testing.assert_allclose(call(encoder), call(plain), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_layers(TEXTS)[-1], plain.encode(TEXTS), atol=1e-5)


def test_prompts_that_are_given_take_their_place(folder: str, tiny_folder: Folder) -> None:
    bare = last(tiny_folder("Llama"))
    assert last(folder, prompts={"STS": "same? "}).prompts == {"query": "", "document": "", "STS": "same? "}
    none = last(folder, prompts={})
    np.testing.assert_allclose(none.encode(TEXTS), bare.encode(TEXTS), atol=1e-5)
    assert shell_line("m", 1, none.options, out="o") == "midlayer export m --layer 1 --prompt query= --out o"
    assert last(folder, prompts={"query": ""}).spec == none.spec
    other = last(folder, default_prompt_name="document")
    np.testing.assert_array_equal(other.encode(TEXTS), other.encode(TEXTS, prompt="a text: "))
    with pytest.raises(OptionError, match=r"folder keeps \(here: .*'query'.*\), but got 'qeury'"):
        last(folder, default_prompt_name="qeury")
    with pytest.raises(OptionError, match=r"`default_prompt_name` must name one of `prompts`.*here: none"):
        last(tiny_folder("Llama"), default_prompt_name="query")
    with pytest.raises(OptionError, match=r"must be None with prompts=\{\}"):
        last(folder, prompts={}, default_prompt_name="query")


def test_a_template_takes_their_place(folder: str, tiny_folder: Folder) -> None:
    asked = last(tiny_folder("Llama"), template=TEMPLATE)
    encoder = last(folder, template=TEMPLATE)
    np.testing.assert_allclose(encoder.encode(TEXTS), asked.encode(TEXTS), atol=1e-5)
    assert encoder.prompts == asked.prompts
    own = last(folder)
    assert not any(own.with_recipe("one-word").prompts.values())
    assert own.with_recipe("one-word").default_prompt == ""
    assert own.with_recipe("instruction").prompts["query"].startswith("Instruct: ")
    assert own.with_recipe("plain").prompts == own.prompts
    np.testing.assert_array_equal(own.with_recipe("plain").encode(TEXTS), own.encode(TEXTS))
    with pytest.raises(OptionError, match=r"without a template.*here: none\), but got 'query'"):
        last(folder, template=TEMPLATE, default_prompt_name="query")


@pytest.mark.parametrize("options", [{}, {"recipe": "instruction"}])
def test_what_is_saved_is_read_again(options: dict[str, Any], folder: str, tmp_path: Path) -> None:
    encoder = LayerEncoder(folder, 2, device="cpu", **options)
    assert any(encoder.prompts.values())
    assert encoder.default_prompt
    encoder.save_pretrained(str(tmp_path / "out"))
    pooling = {"pooling": "last"} if "recipe" in options else {}
    again = last(str(tmp_path / "out"), **pooling)
    plain = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert again.prompts == plain.prompts == encoder.prompts
    assert again.default_prompt_name == plain.default_prompt_name == encoder.default_prompt_name
    for other in (again, plain):
        np.testing.assert_allclose(other.encode(TEXTS), encoder.encode(TEXTS), atol=1e-5)
        np.testing.assert_allclose(other.encode_query(TEXTS), encoder.encode_query(TEXTS), atol=1e-5)


def test_vectors_in_a_file_are_under_the_default(folder: str, tmp_path: Path) -> None:
    plain = SentenceTransformer(folder, device="cpu")
    for name, options in (("STS", {}), ("query", {"prompt_name": "query"})):
        made = embed(folder, TEXTS, tmp_path / f"{name}.npy", layers=[-1], device="cpu", **options)
        np.testing.assert_allclose(np.load(made)[0], plain.encode(TEXTS, prompt_name=name), atol=1e-5)


def test_a_folder_without_prompts_is_the_same_encoder_as_before(tmp_path: Path) -> None:
    home = save_tiny("Llama", tmp_path / "model")
    before = last(home).spec
    (tmp_path / "model" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    assert last(home).spec == before  # no modules.json: not a folder of sentence-transformers
    write(tmp_path / "model", prompts={"query": "", "document": ""}, default_prompt_name=None)
    assert last(home).spec == before
    write(tmp_path / "model", prompts=PROMPTS, model_type="CrossEncoder")
    assert last(home).spec == before
    write(tmp_path / "model", prompts=PROMPTS)
    assert last(home).spec != before
    assert last(home, prompts={}).spec == before


def write(home: Path, **config: Any) -> None:
    """Write what makes a folder one of sentence-transformers, and its settings."""
    module = "sentence_transformers.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{module}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{module}Pooling"},
    ]
    (home / "modules.json").write_text(json.dumps(modules))
    (home / "config_sentence_transformers.json").write_text(json.dumps(config))


def test_prompts_that_are_not_pooled_are_not_used_and_it_is_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = save_tiny("Llama", tmp_path / "model")
    write(tmp_path / "model", prompts=PROMPTS, default_prompt_name="STS")
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps({"include_prompt": False}))
    with caplog.at_level(logging.WARNING, logger="midlayer_encoders.encoder.prompting"):
        assert last(home).prompts == {"query": "", "document": ""}
        assert "its pooling excludes them" in caplog.text
        caplog.clear()
        assert last(home, prompts=PROMPTS).prompts == PROMPTS
        assert not caplog.records


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"prompts": ["a"]}, "must hold valid prompts"),
        ({"prompts": {"a": 1}}, "a prompt is no string"),
        (
            {"prompts": {"a": "b: "}, "default_prompt_name": "c"},
            "the default, 'c', is none of the prompts.*pass `prompts`",
        ),
    ],
)
def test_what_cannot_be_read_is_named(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    write(tmp_path, **config)
    with pytest.raises(ModelNotFoundError, match=match):
        load_saved_prompts(str(tmp_path))


def test_a_model_of_images_has_none(tmp_path: Path) -> None:
    home = save_tiny("ViT", tmp_path / "model")
    write(tmp_path / "model", prompts=PROMPTS, default_prompt_name="STS")
    assert last(home).default_prompt == ""
