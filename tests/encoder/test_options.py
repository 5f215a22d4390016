import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.options import (
    EncoderOptions,
    make_options,
    option_fields,
    option_help,
    python_line,
    shell_line,
)
from midlayer_encoders.errors import DeviceError, MidlayerError, OptionError
from midlayer_encoders.recipes import RECIPES

NAMES = [option.name for option in dataclasses.fields(EncoderOptions)]


def test_constructor_keywords_are_the_options() -> None:
    assert list(option_help()) == NAMES
    parameters = inspect.signature(LayerEncoder).parameters
    assert [name for name in parameters if name in NAMES] == NAMES
    for option in dataclasses.fields(EncoderOptions):
        assert parameters[option.name].default == option.default
        assert option_help()[option.name].endswith(".")
    assert ", ".join(RECIPES) in option_help()["recipe"]


ADDED = """
import inspect
from typer.testing import CliRunner
from midlayer_encoders import EncoderOptions, LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.encoder.options import python_line, shell_line

assert inspect.signature(LayerEncoder).parameters["shout"].default is False
assert LayerEncoder({model!r}, 1, shout=True, device="cpu").spec != LayerEncoder({model!r}, 1, device="cpu").spec
line = CliRunner().invoke(app, ["export", "--help-all"], env={{"COLUMNS": "200"}}).stdout
assert "--shout" in line and "Write the text in capitals." in line
assert python_line("m", 1, EncoderOptions(shout=True)) == "LayerEncoder('m', layer=1, shout=True)"
assert shell_line("m", 1, EncoderOptions(shout=True), out="o") == "midlayer export m --layer 1 --shout --out o"
"""


@pytest.mark.long
def test_option_of_one_declaration_is_keyword_flag_spec_and_line(
    tiny_folder: Callable[[str], str], tmp_path: Path
) -> None:
    package = Path(shutil.copytree(Path(inspect.getfile(EncoderOptions)).parents[1], tmp_path / "midlayer_encoders"))
    source = package / "encoder" / "options.py"
    text = source.read_text()
    for place, added in {
        "        local_files_only: ": "        shout: Write the text in capitals.\n",
        "    local_files_only: ": "    shout: bool = _option(False, check_flag)\n",
    }.items():
        assert text.count(f"\n{place}") == 1
        text = text.replace(f"\n{place}", f"\n{added}{place}")
    source.write_text(text)
    code = ADDED.format(model=tiny_folder("Llama"))
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, check=True)


def test_constructor_is_short_and_the_class_name_contains_sentence_transformers() -> None:
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
        ({"center": ["one text"] * 16}, "`center` must hold 16 different texts or more, but got 1"),
        ({"center": ["too few"]}, "`center` must hold 16 different texts or more"),
        ({"poolign": "mean"}, "`poolign` is not an option of LayerEncoder. Did you mean 'pooling'"),
    ],
)
def test_invalid_options_are_refused_before_reading_files(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEncoder("there/is-no-such-model", 1, **options)  # type: ignore[arg-type]


def test_dtype_is_stored_by_name() -> None:
    assert EncoderOptions(dtype=torch.bfloat16) == EncoderOptions(dtype="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("layer", [[1, 2], (2,), range(3), torch.tensor([1, 2]), True, None])
def test_layer_must_be_one_number(layer: Any, tiny_folder: Callable[[str], str]) -> None:
    with pytest.raises(MidlayerError, match="`layer` must be"):
        LayerEncoder(tiny_folder("Llama"), layer, device="cpu")


def test_modules_refuse_file_options_and_files_refuse_module_options() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for name, value in {"revision": "main", "gguf_file": "a.gguf", "chat_template": True, "adapters": ["x"]}.items():
        with pytest.raises(OptionError, match=f"`{name}` does not apply to a module in memory"):
            LayerEncoder.from_module(module, 1, processor=torch.stack, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"LayerEncoder\.from_module\(module, layer, processor="):
        LayerEncoder(module, 1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`blocks` is not an option"):
        LayerEncoder("there/is-no-such-model", 1, blocks="h")  # type: ignore[call-arg]


def test_built_in_model_takes_no_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.gguf").touch()
    monkeypatch.setattr("midlayer_encoders.models.hub.package_folder", lambda _: tmp_path)
    with pytest.raises(
        OptionError, match=r"`gguf_file` must be None for 'built-in', which has its own, but got 'other\.gguf'"
    ):
        LayerEncoder("built-in", 1, gguf_file="other.gguf")


@pytest.mark.parametrize(
    ("option", "words", "message"),
    [
        ("prompts", ["query"], "must be NAME=TEXT, but got 'query'"),
        ("prompts", ["a=b", "=c"], "must be NAME=TEXT, but got ''"),
        ("template", ["{text}", "query={text}"], "must be given once, or as query=…, document=… and text=…"),
    ],
)
def test_words_of_a_flag_that_cannot_be_parsed_are_refused(option: str, words: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        option_fields()[option].metadata["parse"](words)


def test_shell_lines_are_quoted() -> None:
    options = EncoderOptions(prompts={"query": "say 'it': "}, default_prompt_name="query", adapters=("a b", "c"))
    assert shell_line("my model", {"text": 1, "image": 0.5}, options, out="o") == (
        "midlayer export 'my model' --layer text=1,image=0.5 --prompt 'query=say '\"'\"'it'\"'\"': ' "
        "--default-prompt query --adapter 'a b' --adapter c --out o"
    )
    assert "prompts={'query': \"say 'it': \"}" in python_line("my model", 1, options)
    with pytest.raises(OptionError, match="`center` cannot be written as a command"):
        shell_line("m", 1, EncoderOptions(center=tuple("abcdefghijklmnop")), out="o")


def test_printed_line_keeps_options_that_differ_from_the_recipe() -> None:
    for pooling, printed in (("mean", "pooling='mean', "), ("last", ""), (None, "")):  # the recipe pools the last token
        options = EncoderOptions(recipe="one-word", pooling=pooling)  # type: ignore[arg-type]
        assert python_line("m", 1, options) == f"LayerEncoder('m', layer=1, {printed}recipe='one-word')"


INVALID = {
    "trust_remote_code='no'": "`trust_remote_code` must be True or False, but got 'no'",
    "bidirectional=1": "`bidirectional` must be True or False, but got 1",
    "chat_template=None": "`chat_template` must be True or False, but got None",
    "prompts={'a': 1}": r"`prompts\['a'\]` must be a string, but got 1 \(int\)",
    "prompts=['a']": r"`prompts` must be a dict of names and texts, but got \['a'\]",
    "prompts={'a': 'cut \\ud83d'}": r"unpaired surrogate \\ud83d, which is half of an emoji",
    "default_prompt_name='a', prompts={}": r"`default_prompt_name` must be None with prompts=\{\}",
    "revision=3": "`revision` must be a string, but got 3",
    "device='gpu'": "`device` must be one of cpu.* on this machine, but got 'gpu'",
    "device='cuda:99'": "`device` must be one of cpu.* on this machine, but got 'cuda:99'",
    "device=0": "`device` must be a device such as 'cpu' or 'cuda:1', but got 0",
    "device='meta'": "`device` must be one of cpu.* on this machine, but got 'meta'",
    "device_map=3": "`device_map` must be a string",
    "dtype=int": "`dtype` must be one of 'float32'",
    "adapters=[3]": r"`adapters\[0\]` must be a string, but got 3",
    "adapters={'a'}": "`adapters` must be a list of adapters",
    "gguf_file=b'a'": "`gguf_file` must be a string, but got b'a'",
    "max_pixels=None": "`max_pixels` must be a positive number of pixels, but got None",
    "max_length=float('nan')": "`max_length` must be a positive number of tokens, but got nan",
    "truncate_dim=float('inf')": "`truncate_dim` must be a positive number of dimensions, but got inf",
    "max_length=10**5000": "`max_length` must be a positive number of tokens, but got an int",
    "center=5": "`center` must be a list of texts, but got 5",
    "center=[1] * 16": r"`center\[0\]` must be a string, but got 1",
    "pooling=torch.zeros(2)": r"`pooling` must be one of .* but got a Tensor of shape \(2,\)",
}


@pytest.mark.parametrize("option", INVALID)
def test_option_of_the_wrong_type_is_refused_before_reading_files(option: str) -> None:
    with pytest.raises((OptionError, DeviceError), match=INVALID[option]):
        eval(f"LayerEncoder('there/is-no-such-model', 1, {option})", {"LayerEncoder": LayerEncoder, "torch": torch})


def test_numpy_numbers_and_torch_devices_are_accepted() -> None:
    import numpy as np

    options = make_options({"max_length": np.int64(8), "bidirectional": np.bool_(True), "device": torch.device("cpu")})
    assert (options.max_length, options.bidirectional, options.device) == (8, True, "cpu")
    assert (type(options.max_length), type(options.bidirectional), type(options.device)) == (int, bool, str)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("ViT", {"max_length": 8}, "`max_length` does not apply to .*, which takes no text, but got 8"),
        ("ViT", {"prompts": {"q": "q: "}}, "`prompts` does not apply to .*, which takes no text"),
        ("Wav2Vec2", {"max_length": 8}, "which takes no text"),
        ("Llama", {"max_pixels": 9}, "`max_pixels` does not apply to .*, which takes no image, but got 9"),
        ("Llama", {"truncate_dim": 33}, "`truncate_dim` must be at most 32 for .*, but got 33"),
    ],
)
def test_option_without_effect_is_refused(
    tiny_folder: Callable[[str], str], family: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEncoder(tiny_folder(family), 1, device="cpu", **options)  # type: ignore[arg-type]
    if "truncate_dim" in options:
        assert LayerEncoder(tiny_folder(family), 1, device="cpu", truncate_dim=32).encode("a").shape == (32,)
