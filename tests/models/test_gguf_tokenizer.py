"""Tokenizers of GGUF files have llama.cpp's ids; kinds and rules that are not supported are refused."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, ModelNotFoundError, OptionError
from midlayer_encoders.extras.gguf.file import read_gguf
from midlayer_encoders.extras.gguf.tokenizer import build_tokenizer
from tests.models.gguf_tokens import (
    FIXTURE,
    KINDS,
    VARIANTS,
    compare,
    digest,
    sample_texts,
    variant_texts,
    write_vocabulary,
)

gguf = pytest.importorskip("gguf", reason="pip install 'midlayer-encoders[gguf]'")

_STORED = json.loads(FIXTURE.read_text("utf8"))
VOCABULARIES: dict[str, dict[str, Any]] = _STORED["vocabularies"]
TEXTS: list[str] = _STORED["texts"]


def named(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as a reader of the file would, without writing it."""
    result = {name if "general" in name else f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    if replaced := result.get("tokenizer.ggml.precompiled_charsmap"):
        result["tokenizer.ggml.precompiled_charsmap"] = list(base64.b64decode(replaced))
    return {name: value for name, value in result.items() if value is not None}


def token_ids(tokenizer: Any, texts: list[str] = TEXTS) -> list[list[int]]:
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_and_its_saved_folder_have_the_ids_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    from sentence_transformers import SentenceTransformer

    write_vocabulary(tmp_path / "model.gguf", VOCABULARIES[kind])
    encoder = LayerEncoder(str(tmp_path), 1, gguf_file="model.gguf", device="cpu")
    assert token_ids(encoder.tokenizer) == _STORED["ids"][kind]
    encoder.save_pretrained(str(tmp_path / "saved"))
    plain = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert token_ids(plain.tokenizer) == _STORED["ids"][kind]
    texts = [text for text in TEXTS if text]
    np.testing.assert_array_equal(plain.encode(texts), encoder.encode(texts))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_of_a_file_takes_precedence_over_that_of_its_model_type(tmp_path: Path, kind: str) -> None:
    """transformers would replace the tokenizer of any Qwen2 folder by its own class."""
    write_vocabulary(tmp_path / "model.gguf", VOCABULARIES[kind], architecture="qwen2")
    encoder = LayerEncoder(str(tmp_path), 1, gguf_file="model.gguf", device="cpu")
    assert token_ids(encoder.tokenizer) == _STORED["ids"][kind]
    with pytest.raises(CutError, match="or its tokenizer differently"):
        encoder.save_pretrained(str(tmp_path / "saved"))


@pytest.mark.parametrize("name", VARIANTS)
def test_flags_and_pre_tokenizers_are_those_of_llama_cpp(name: str) -> None:
    kind, changes = VARIANTS[name]
    tokenizer = build_tokenizer(named(VOCABULARIES[kind] | changes))
    assert digest(token_ids(tokenizer, variant_texts(name, TEXTS))) == _STORED["digests"][name]


def test_end_tokens_are_special_whatever_their_type() -> None:
    fields = named(VOCABULARIES["gpt2"])
    tokens = fields["tokenizer.ggml.tokens"]
    end = tokens.index("<|im_end|>")
    types = list(fields["tokenizer.ggml.token_type"])
    types[end] = 1  # normal
    tokenizer = build_tokenizer(fields | {"tokenizer.ggml.token_type": types})
    assert end in tokenizer("a<|im_end|>b")["input_ids"]


def extended(kind: str, tokens: dict[str, int], score: float = -1.0, **changes: Any) -> dict[str, Any]:
    """Return the fields of a vocabulary with further tokens, by their types."""
    fields = VOCABULARIES[kind]
    result = {"tokens": [*fields["tokens"], *tokens], "token_type": [*fields["token_type"], *tokens.values()]}
    if "scores" in fields:  # of a Unigram or SentencePiece model
        result["scores"] = [*fields["scores"], *[score] * len(tokens)]
    return named(fields | result | changes)


def pieces(fields: dict[str, Any], text: str) -> list[str]:
    tokenizer = build_tokenizer(fields)
    return [fields["tokenizer.ggml.tokens"][number] for number in tokenizer(text)["input_ids"]]


@pytest.mark.parametrize("token", ["<|fim_prefix|>", "▁<MID>", "<reponame>", "<|channel|>"])
def test_tokens_that_llama_cpp_knows_by_name_are_special(token: str) -> None:
    assert token in pieces(extended("gpt2", {token: 1}), f"a{token}b")


def test_a_file_can_name_the_token_of_a_role() -> None:
    fields = extended("gpt2", {"<PRE>": 1}, fim_pre_token_id=0)
    assert "<PRE>" not in pieces(fields, "a<PRE>b")


def test_an_end_of_text_beside_tool_responses_is_a_word() -> None:
    assert "</s>" in pieces(extended("gpt2", {"</s>": 3}), "a</s>b")
    assert "</s>" not in pieces(extended("gpt2", {"</s>": 3, "<|tool_response>": 3}), "a</s>b")


def test_runs_of_spaces_can_be_special_tokens() -> None:
    fields = extended("gpt2", {" " * number: 4 for number in range(2, 6)})
    assert pieces(fields, "a" + " " * 8 + "b") == ["a", " " * 5, " " * 3, "b"]


def test_unigram_scores_of_special_tokens_are_those_of_llama_cpp() -> None:
    """User-defined tokens score 0 and are found after replacements; a control token does not lower the others."""
    assert "<1>" in pieces(extended("t5", {"<1>": 4}, -1000.0), "<１>")
    scores = [*VOCABULARIES["t5"]["scores"], -500.0, -9.0]
    assert "▁the" in pieces(extended("t5", {"qq": 3, "e🦊": 1}, scores=scores), "the🦊")


@pytest.mark.parametrize(
    ("kind", "tokens", "why"),
    [
        ("llama", {"ab": 4, "bcd": 4}, "special tokens that can overlap in a text: 'ab' and 'bcd'"),
        ("gpt2", {"<PRE>": 1, "<fim_prefix>": 1}, "several tokens for one role in infilling: <PRE>, <fim_prefix>"),
        ("llama", {"🦊x": 1}, "merges the pieces of '🦊x'"),
        ("llama", {"e<": 1, "<e": 1}, "merges the pieces of '.*' in an order that is not supported"),
        ("t5", {"\n\n": 4}, "user-defined token with characters that are replaced elsewhere"),
        ("t5", {"▁zq": 4}, "user-defined token with characters that are replaced elsewhere"),
        ("t5", {"<0x41>": 6}, "has tokens for bytes"),
    ],
)
def test_tokens_that_llama_cpp_treats_differently_are_refused(kind: str, tokens: dict[str, int], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        build_tokenizer(extended(kind, tokens))


def test_tokenizer_has_the_chat_template_of_its_file() -> None:
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    tokenizer = build_tokenizer(named(VOCABULARIES["gpt2"]) | {"tokenizer.chat_template": template})
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "[user] hello"


@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_words_that_no_merge_reaches_are_whole_in_llama_3(pre: str, is_whole: bool) -> None:
    fields = named(VOCABULARIES["gpt2"] | {"pre": pre})
    tokens = [*fields["tokenizer.ggml.tokens"], "zqxj"]
    types = [*fields["tokenizer.ggml.token_type"], 1]
    tokenizer = build_tokenizer(fields | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})
    assert (len(tokens) - 1 in tokenizer("zqxj")["input_ids"]) is is_whole


@pytest.mark.parametrize("token", ["$", "$B", "a:1"])
def test_template_with_a_token_in_template_syntax_adds_its_id(token: str) -> None:
    fields = named(VOCABULARIES["gpt2"] | {"add_bos_token": False, "add_eos_token": True})
    tokens = [*fields["tokenizer.ggml.tokens"], "x:2"]
    number = tokens.index(token) if token in tokens else len(tokens) - 1
    tokens[number] = token
    types = [*fields["tokenizer.ggml.token_type"], 1]
    end = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": number}
    without = build_tokenizer(fields | end | {"tokenizer.ggml.add_eos_token": False})("hello")["input_ids"]
    assert build_tokenizer(fields | end)("hello")["input_ids"] == [*without, number]


def test_the_reader_agrees_with_that_of_gguf(tmp_path: Path) -> None:
    fields = VOCABULARIES["t5"] | {"general.name": "größer", "add_eos_token": True}
    path = write_vocabulary(tmp_path / "model.gguf", fields)
    expected = {
        name: field.contents() for name, field in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")
    }
    result = read_gguf(path).fields
    assert result.pop("tokenizer.ggml.scores") == pytest.approx(expected.pop("tokenizer.ggml.scores"))
    assert result == expected


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("llama", {"model": "rwkv"}, "is of the kind 'rwkv', but supported kinds are llama, gpt2, bert, t5"),
        ("gpt2", {"pre": "kimi-k2"}, "splits texts by the rule 'kimi-k2'"),
        ("gpt2", {"token_type": None}, "has no `tokenizer.ggml.token_type`"),
        ("gpt2", {"token_type": [1]}, "has 1 entries in `tokenizer.ggml.token_type`"),
        ("llama", {"scores": [0.0]}, "has 1 entries in `tokenizer.ggml.scores`"),
        ("llama", {"scores": [0.0] * len(VOCABULARIES["llama"]["tokens"])}, "merges the pieces of"),
        ("gpt2", {"merges": None}, "has no `tokenizer.ggml.merges`"),
        ("t5", {"scores": None}, "has no `tokenizer.ggml.scores`"),
        ("gpt2", {"add_bos_token": True, "bos_token_id": None}, "adds a BOS token to each text, but does not name it"),
        ("bert", {"seperator_token_id": 10**6}, "adds a SEP token"),
        ("t5", {"unknown_token_id": 10**6}, "has no token for unknown characters"),
        ("gpt2", {"tokens": ["a"] * len(VOCABULARIES["gpt2"]["tokens"])}, "has .* duplicate tokens"),
        (
            "llama",
            {"tokens": [token.replace("<0x0A>", "<newline>") for token in VOCABULARIES["llama"]["tokens"]]},
            "has no token for 1 of 256 bytes",
        ),
        ("gpt2", {"merges": ["x yzzy"]}, "has invalid merges"),
    ],
)
def test_a_tokenizer_that_is_not_supported_is_refused(kind: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=f"{why}.*Pass the folder of the original model"):
        build_tokenizer(named(VOCABULARIES[kind] | changes))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"not a file of this kind at all", "starts with b'not '"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version 50331648"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 100), "truncated"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1), "buffer"),
        (b"", "empty file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelNotFoundError, match=rf"`gguf_file` must be a GGUF file .*model\.gguf.*{why}"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.extras
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_texts_have_the_ids_of_llama_cpp(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("xllamacpp", reason="pip install 'midlayer-encoders[gguf]'")
    different, number = compare(write_vocabulary(tmp_path / "model.gguf", VOCABULARIES[kind]), sample_texts())
    assert different == 0
    assert number > 10_000
