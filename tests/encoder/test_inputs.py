"""Inputs of ``encode``: accepted, or refused with their position in the list."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.reading.media_inputs import InputError
from tests.support.tiny_folders import TEXTS, Folder, save_joint

HALF = "cut in two: \ud83d"


@pytest.fixture(scope="module")
def llama(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def test_unpaired_surrogate_error_names_its_position_and_the_fix(llama: LayerEncoder) -> None:
    message = r"contains the unpaired surrogate \\ud83d, which is half of an emoji. .* text\.encode\('utf8', 'ignore'\)\.decode\(\)"
    with pytest.raises(InputError, match="Input 1: .*" + message):
        llama.encode(["a text", HALF])
    with pytest.raises(InputError, match=message):
        llama.encode(HALF)
    with pytest.raises(OptionError, match=r"`texts\[1\]`.*" + message):
        measure(llama, ["a text", HALF], metrics="curvature")
    assert llama.encode(HALF.encode("utf8", "ignore").decode()).shape == (32,)


@pytest.mark.parametrize(
    "item",
    [None, 3, b"bytes", object(), {"x": "a"}, {}, [], ("a",), Path("a.txt"), np.array(3), torch.tensor(1.0), ["a"]],
)
def test_invalid_text_is_refused_alone_and_in_a_list(llama: LayerEncoder, item: Any) -> None:
    with pytest.raises(InputError, match=r"^Input 1: `inputs` must"):
        llama.encode(["a text", item])
    if not isinstance(item, list | tuple):  # those are batches
        with pytest.raises(MidlayerError, match=r"^`inputs` must"):
            llama.encode(item)


def test_text_in_a_dict_by_medium_is_accepted(llama: LayerEncoder) -> None:
    np.testing.assert_array_equal(llama.encode([{"text": "a text"}, {"text": ""}]), llama.encode(["a text", ""]))
    with pytest.raises(InputError, match="must each be a text"):
        llama.encode([{"image": "a text"}])


def test_empty_text_of_a_joint_model_is_a_zero_vector(tmp_path: Path) -> None:
    encoder = LayerEncoder(save_joint("CLIP", tmp_path), 1, device="cpu")
    assert not encoder.encode("").any()
    with pytest.raises(InputError, match="There is no file 'a cat'"):
        encoder.encode({"image": "a cat"})
    assert encoder.encode("a" * 300 + ".png").any()  # too long to be a file: a text


def test_batch_size_zero_is_refused(llama: LayerEncoder) -> None:
    with pytest.raises(OptionError, match="`batch_size` must be a positive number of inputs, but got 0"):
        llama.encode(TEXTS, batch_size=0)


@pytest.mark.parametrize("model", [None, 3, "", "a" * 300, "no\0where", Path("nowhere/at/all"), "\ud83d", b"m"])
def test_invalid_model_is_refused(model: Any) -> None:
    with pytest.raises(MidlayerError, match="model"):
        LayerEncoder(model, 1)


def test_folder_may_be_a_path_and_layer_a_numpy_number(tiny_folder: Folder) -> None:
    folder = tiny_folder("Llama")
    expected = LayerEncoder(folder, 2, device="cpu").encode("a text")
    for layer in (np.int64(2), np.float32(0.5), torch.tensor(2)):
        encoder = LayerEncoder(Path(folder), layer, device="cpu")  # type: ignore[arg-type]
        assert (encoder.layer, type(encoder.layer)) == (2, int)
        np.testing.assert_array_equal(encoder.encode("a text"), expected)


@pytest.mark.parametrize("layer", [True, np.bool_(True), None, "two", [], float("nan"), float("inf"), 10**400, 1 + 2j])
def test_invalid_layer_is_refused(tiny_folder: Folder, layer: Any) -> None:
    with pytest.raises(OptionError, match="`layer`"):
        LayerEncoder(tiny_folder("Llama"), layer, device="cpu")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"])
def test_damaged_model_file_raises_a_midlayer_error(tiny_folder: Folder, tmp_path: Path, name: str) -> None:
    import shutil

    folder = shutil.copytree(tiny_folder("Llama"), tmp_path / "model")
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(MidlayerError, match=str(folder)):
        LayerEncoder(str(folder), 1, device="cpu")
