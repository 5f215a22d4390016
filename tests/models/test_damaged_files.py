"""Damaged and hostile folders are refused with the cause, and nothing outside of them is read or run."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, MidlayerError, ModelNotFoundError, OptionError
from tests.support.tiny_folders import save_tiny


class RunsCode:
    """Unpickling it would run a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("false",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_tiny("Llama", tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def message(folder: Path, error: type[MidlayerError] = ModelNotFoundError) -> str:
    """Return the message with which a folder is refused, which never recommends to load a pickle nevertheless."""
    with pytest.raises(error) as caught:
        LayerEncoder(str(folder), 2, device="cpu")
    text = str(caught.value)
    assert "weights_only" not in text
    assert "number of blocks" not in text
    assert text.isprintable()
    return text


@pytest.mark.parametrize("setting", ["hidden_size", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("size", [10**7, 10**12])
def test_encoder_config_larger_than_the_files_is_refused(setting: str, size: int, folder: Path) -> None:
    edit_config(folder, **{setting: size})
    assert "parameters, but its weights have" in message(folder)


@pytest.mark.parametrize(
    "content", ["[]", "3", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "x", "[" * 10**5]
)
def test_encoder_damaged_index_is_refused(content: str, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert "model.safetensors.index.json must be a JSON object" in message(folder)


def test_encoder_truncated_pickle_is_called_damaged(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"norm.weight": torch.ones(32)}, folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:200])
    text = message(folder, CutError)
    assert "failed reading zip archive" in text
    assert "Its files may be damaged" in text


def save_modules(folder: Path, *types: str) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [
        {"idx": number, "name": name, "path": "", "type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(types, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_encoder_folder_that_normalizes_without_pooling_is_refused(tmp_path: Path) -> None:
    folder = Path(save_tiny("BERT", tmp_path / "model"))
    save_modules(folder, "Normalize")
    with pytest.raises(OptionError, match=r"`pooling` must be named for .*/model: none of the modules"):
        LayerEncoder(str(folder), -1, device="cpu")
    encoder = LayerEncoder(str(folder), -1, device="cpu", pooling="mean")
    assert np.allclose(np.linalg.norm(encoder.encode(["a text"]), axis=-1), 1)


def test_encoder_truncate_dim_that_is_no_number_is_named(tmp_path: Path) -> None:
    folder = Path(save_tiny("BERT", tmp_path / "model"))
    save_modules(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": "x"}))
    assert "truncate_dim is not a whole number" in message(folder)


@pytest.mark.parametrize("place", ["../outside.safetensors", "{}/outside.safetensors", "a/../../outside.safetensors"])
def test_encoder_index_of_files_outside_is_refused(place: str, folder: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        weights = dict.fromkeys(file.keys(), place.format(tmp_path))
    (folder / "a").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    assert f"must name files of its own folder, but names {place.format(tmp_path)!r}" in message(folder)


@pytest.mark.parametrize("kind", ["archive", "plain"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_encoder_hostile_pickle_is_named(kind: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    content = {"weight": RunsCode()}
    if kind == "archive":
        torch.save(content, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content, protocol=2))
    assert "pickled file of weights refers to posix.system, which could run code" in message(folder)


def test_encoder_hostile_pickle_of_a_module_is_named(tmp_path: Path) -> None:
    transformer = Transformer(save_tiny("BERT", tmp_path / "bert"))
    width = transformer.get_embedding_dimension()
    SentenceTransformer(modules=[transformer, Pooling(width), Dense(width, 8)]).save(str(tmp_path / "model"))
    (tmp_path / "model" / "2_Dense" / "model.safetensors").unlink()
    torch.save({"weight": RunsCode()}, tmp_path / "model" / "2_Dense" / "pytorch_model.bin")
    assert "pickled file of weights refers to posix.system" in message(tmp_path / "model")


def test_encoder_control_characters_of_a_config_are_escaped(folder: Path) -> None:
    edit_config(folder, model_type="llama\n\x1b[31mEVIL\u202e")
    text = message(folder)
    assert r"llama \x1b[31mEVIL\u202e" in text
