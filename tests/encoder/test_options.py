from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.options import EncoderKeywords, EncoderOptions, make_options, python_line, shell_line
from midlayer_encoders.errors import OptionError

NAMES = [one.name for one in dataclasses.fields(EncoderOptions)]


def test_the_keywords_of_the_constructor_are_the_options() -> None:
    assert list(EncoderKeywords.__annotations__) == NAMES
    shown = inspect.signature(LayerEncoder).parameters
    assert [name for name in shown if name in NAMES] == NAMES
    for one in dataclasses.fields(EncoderOptions):
        assert shown[one.name].default == one.default
        assert f"        {one.name}: " in (EncoderOptions.__doc__ or ""), f"{one.name} is not described"
        assert one.metadata["help"]


def test_the_constructor_is_short_and_is_found_by_the_name_of_its_module() -> None:
    assert len(inspect.getsource(LayerEncoder.__init__).splitlines()) <= 40
    # BERTopic and KeyBERT recognize a SentenceTransformer by this string, and embed with another model otherwise.
    assert "sentence_transformers" in str(LayerEncoder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "last"}, "`norm` must be one of 'final', 'none'"),
        ({"pooling": "maen"}, "Did you mean 'mean'"),
        ({"tower": "sound"}, "`tower` must be one of 'text', 'image'"),
        ({"max_length": 0}, "`max_length` must be a positive number of tokens, but got 0"),
        ({"max_length": True}, "`max_length` must be a positive number of tokens, but got True"),
        ({"truncate_dim": -1}, "`truncate_dim` must be a positive number of dimensions"),
        ({"max_pixels": 1.5}, "`max_pixels` must be a positive number of pixels"),
        ({"dtype": "float33"}, "Did you mean 'float32'"),
        ({"adapters": "a/b"}, r"Write \['a/b'\]"),
        ({"device": "cpu", "device_map": "auto"}, "`device` must be None when `device_map`"),
        ({"default_prompt_name": "query", "prompts": {"qeury": "q: "}}, "Did you mean 'qeury'"),
        ({"center": ["too few"]}, "`center` must hold 16 texts or more"),
        ({"poolign": "mean"}, "`poolign` is not an option of LayerEncoder. Did you mean 'pooling'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEncoder("there/is-no-such-model", 1, **options)  # type: ignore[arg-type]


def test_a_dtype_is_kept_by_its_name() -> None:
    assert EncoderOptions(dtype=torch.bfloat16) == EncoderOptions(dtype="bfloat16")  # type: ignore[arg-type]


def test_the_old_spelling_of_center_works_with_a_warning() -> None:
    texts = [f"text {number}" for number in range(16)]
    with pytest.warns(DeprecationWarning, match="`centre` is spelled `center` now"):
        assert make_options({"centre": texts}).center == tuple(texts)


def test_a_module_in_memory_refuses_options_of_files_and_files_refuse_a_module() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for name, value in {"revision": "main", "gguf_file": "a.gguf", "chat_template": True, "adapters": ["x"]}.items():
        with pytest.raises(OptionError, match=f"`{name}` must be left out for a module in memory"):
            LayerEncoder.from_module(module, 1, processor=torch.stack, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"LayerEncoder\.from_module\(module, layer, processor="):
        LayerEncoder(module, 1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`blocks` is not an option"):
        LayerEncoder("there/is-no-such-model", 1, blocks="h")  # type: ignore[call-arg]


def test_lines_quote_what_a_shell_would_split() -> None:
    options = EncoderOptions(prompts={"query": "say 'it': "}, default_prompt_name="query", adapters=("a b", "c"))
    assert shell_line("my model", {"text": 1, "image": 0.5}, options, out="o") == (
        "midlayer export 'my model' --layer text=1,image=0.5 --prompt 'query=say '\"'\"'it'\"'\"': ' "
        "--default-prompt query --adapter 'a b' --adapter c --out o"
    )
    assert "prompts={'query': \"say 'it': \"}" in python_line("my model", 1, options)
    with pytest.raises(OptionError, match="`center` cannot be written as a command"):
        shell_line("m", 1, EncoderOptions(center=tuple("abcdefghijklmnop")), out="o")
