"""A cut GGUF file keeps every bit, and files that llama.cpp would run differently are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.export.llama_cpp import cut_gguf
from midlayer_encoders.extras.gguf.cache import GgufWeights
from midlayer_encoders.models.hub import Location
from tests.export.tiny_gguf import DEPTH, save_gguf
from tests.support.tiny_folders import Folder

gguf = pytest.importorskip("gguf", reason="pip install 'midlayer-encoders[gguf]'")


def located(path: Path) -> Location:
    return Location(str(path.parent), read_weights=GgufWeights(path, path.name))


def fields(reader: Any) -> dict[str, Any]:
    return {name: item.contents() for name, item in reader.fields.items() if not name.startswith("GGUF.")}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "bert"])
@pytest.mark.parametrize(("layer", "pooling", "number"), [(1, "mean", 1), (3, "last", 3), (DEPTH, "cls", 2)])
def test_the_weights_are_the_same_bits_and_the_metadata_is_of_fewer_blocks(
    tmp_path: Path, arch: str, layer: int, pooling: str, number: int
) -> None:
    source = save_gguf(tmp_path / "whole.gguf", arch, alignment=64 if layer == 3 else None)
    cut_gguf(source, tmp_path / "cut.gguf", layer, pooling=pooling)
    complete, cut = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "cut.gguf")
    saved = [
        item for item in complete.tensors if not item.name.startswith("blk.") or int(item.name.split(".")[1]) < layer
    ]
    assert [item.name for item in cut.tensors] == [item.name for item in saved]
    for item, tensor in zip(saved, cut.tensors, strict=True):
        assert (item.tensor_type, item.shape.tolist()) == (tensor.tensor_type, tensor.shape.tolist())
        np.testing.assert_array_equal(item.data, tensor.data)
    changed = {f"{arch}.block_count": layer, f"{arch}.pooling_type": number}
    changed[f"{arch}.attention.head_count_kv"] = list(range(1, layer + 1))
    assert fields(cut) == fields(complete) | changed
    assert cut.alignment == complete.alignment


@pytest.mark.parametrize(
    ("arch", "options", "why"),
    [
        ("mamba", {}, "has the architecture 'mamba'.*Supported architectures are llama, qwen2"),
        ("gemma2", {"depth": 46}, "recognizes the 27B model of gemma2"),
        ("gemma3", {"depth": 62}, "recognizes the 27B model of gemma3"),
        ("llama", {"parts": 2}, "llama-gguf-split --merge"),
    ],
)
def test_a_file_that_would_run_differently_is_refused(
    tmp_path: Path, arch: str, options: dict[str, Any], why: str
) -> None:
    source = save_gguf(tmp_path / "whole.gguf", arch, **options)
    with pytest.raises(CutError, match=why):
        cut_gguf(source, tmp_path / "cut.gguf", 1, pooling="mean")
    assert not (tmp_path / "cut.gguf").exists()


@pytest.mark.parametrize(
    ("layer", "options", "why"),
    [
        (2, {"norm": "none"}, "always applies the final norm"),
        (0, {}, "no model without blocks"),
        (2, {"pooling": "max"}, "no pooling 'max'"),
        (2, {"pooling": "weightedmean"}, "no pooling 'weightedmean'"),
        (2, {"recipe": "one-word"}, "the tokenizer contains a template"),
        (2, {"skip_first": 1}, "pools all tokens"),
        (2, {"center": tuple(f"text {n}" for n in range(16))}, "no modules after the pooling"),
        (2, {"truncate_dim": 8}, "all dimensions"),
        (2, {"bidirectional": True}, "without `bidirectional`"),
    ],
)
def test_features_that_llama_cpp_lacks_are_refused(
    tiny_folder: Folder, tmp_path: Path, layer: Any, options: dict[str, Any], why: str
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), layer, device="cpu", **options)
    encoder.location = located(save_gguf(tmp_path / "weights.gguf", "llama"))
    with pytest.raises(CutError, match=why):
        export_for(encoder, "gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.gguf"]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"chat_template": True}, "the tokenizer contains a template"),
        ({"adapters": ("a",)}, "the file holds the model without `adapters`: leave it out"),
        ({}, "the encoder was trained after loading, but the file was not"),
    ],
)
def test_encoder_that_differs_from_its_file_is_refused(
    tiny_folder: Folder, tmp_path: Path, option: dict[str, Any], why: str
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.location = located(save_gguf(tmp_path / "weights.gguf", "llama"))
    encoder.options = replace(encoder.options, **option)
    if not option:
        encoder.model_card_data.add_tags("generated_from_trainer")
    with pytest.raises(CutError, match=why):
        export_for(encoder, "gguf", tmp_path / "out")


def test_weights_of_a_file_are_not_quantized_again(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.location = located(save_gguf(tmp_path / "weights.gguf", "llama"))
    with pytest.raises(OptionError, match="`int8` does not apply to an encoder read from a GGUF file"):
        export_for(encoder, "gguf", tmp_path / "out", int8=True)
