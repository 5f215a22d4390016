"""Vectors of many layers in files, compared with the encoder: contents, description and invalid calls."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors import safe_open

from midlayer_encoders import LayerEncoder, embed
from midlayer_encoders.errors import DiskFullError, MidlayerError, OptionError
from midlayer_encoders.extras.vectors import embedding
from tests.support.made_media import IMAGES, WAVEFORMS
from tests.support.tiny_folders import TEXTS, Folder

INPUTS = [*TEXTS, TEXTS[0]]  # one stands there twice


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def read(path: Path) -> tuple[np.ndarray, Mapping[str, Any]]:
    """Return the vectors ``(L, N, D)`` of a file and what it says about them, by other libraries."""
    if path.suffix == ".npy":
        return np.load(path), json.loads(path.with_name(path.name + ".json").read_bytes())
    if path.suffix == ".parquet":
        about = json.loads(pl.read_parquet_metadata(path)["midlayer"])
        frame = pl.read_parquet(path)
        return np.stack([frame[f"layer_{layer}"].to_numpy() for layer in about["layers"]]), about
    with safe_open(path, "np") as file:
        about = json.loads(file.metadata()["midlayer"])
        return np.stack([file.get_tensor(f"layer.{layer}") for layer in about["layers"]]), about


@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
def test_file_holds_the_vectors_of_the_encoder_and_their_description(
    suffix: str, encoder: LayerEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "_BLOCK_BYTES", 2 * 3 * 4 * 32)  # two inputs at a time
    monkeypatch.setattr(embedding, "CHUNK", 3)  # so that a chunk ends within a block
    recorded: list[tuple[str, int, int]] = []
    out = tmp_path / f"vectors{suffix}"
    result = embed(
        encoder, INPUTS, out, layers=[-1, 0, 0.5], token_budget=64, progress=lambda *item: recorded.append(item)
    )
    actual, about = read(result)
    np.testing.assert_allclose(actual, encoder.encode_layers(INPUTS, [0, 2, 4]), atol=1e-5)
    spec = encoder.spec
    expected = {
        "model": spec.model, "revision": None, "weights": spec.weights_digest, "layers": [0, 2, 4], "num_layers": 4,
        "norm": "final", "pooling": "mean", "recipe": None, "inputs": len(INPUTS), "prompt": "",
    }  # fmt: skip
    assert expected.items() <= about.items()
    assert {"torch", "midlayer-encoders"} <= about["versions"].keys()
    assert len(about["inputs_digest"]) == 32
    assert ("embedding", len(INPUTS), len(INPUTS)) in recorded
    assert recorded[-1] == ("writing", 3 * len(INPUTS), 3 * len(INPUTS))
    names = {out.name, out.name + ".json"} if suffix == ".npy" else {out.name}
    assert {path.name for path in tmp_path.iterdir()} == names  # nothing else is left
    if suffix == ".parquet":
        assert pl.read_parquet(out)["input"].to_list() == INPUTS


def test_description_names_the_prompt_in_use(tiny_folder: Folder, tmp_path: Path) -> None:
    prompts = {"ask": "what is ", "say": "this is "}
    encoder = LayerEncoder(tiny_folder("Llama"), 1, prompts=prompts, default_prompt_name="ask", device="cpu")
    options: list[dict[str, str]] = [{}, {"prompt_name": "say"}, {"prompt": "a: "}]
    for keywords, prompt in zip(options, ("what is ", "this is ", "a: "), strict=True):
        actual, about = read(embed(encoder, TEXTS, tmp_path / "vectors.npy", layers=[1], **keywords))  # type: ignore[arg-type]
        assert about["prompt"] == prompt
        np.testing.assert_allclose(actual[0], encoder.encode(TEXTS, prompt=prompt), atol=1e-5)


@pytest.mark.parametrize(
    ("family", "inputs", "options"),
    [("Llama", TEXTS, {"recipe": "one-word"}), ("ViT", IMAGES, {}), ("Wav2Vec2", WAVEFORMS, {"norm": "none"})],
)
def test_recipes_images_and_waveforms(
    family: str, inputs: list[Any], options: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    result = embed(tiny_folder(family), inputs, tmp_path / "v.safetensors", device="cpu", **options)
    full_encoder = LayerEncoder(tiny_folder(family), -1, device="cpu", **options)
    actual, about = read(result)
    np.testing.assert_allclose(actual, full_encoder.encode_layers(inputs), atol=1e-5)
    assert (about["recipe"], about["norm"]) == (options.get("recipe"), options.get("norm", "final"))


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("v.parqet", {}, "must end in .npy, .safetensors, .parquet.* Did you mean '.parquet'"),
        ("nowhere/v.npy", {}, "`out` must be in an existing folder"),
        ("folder.npy", {}, "is a folder: use another"),
        ("v.npy", {"layers": [9]}, r"in \[0, 4\]"),
        ("v.npy", {"inputs": []}, "`inputs` must hold at least one input"),
        ("v.npy", {"inputs": ["a", None]}, r"`inputs\[1\]` must be a string"),
        ("v.npy", {"inputs": "a text"}, "must be a list of inputs, but got one"),
        ("v.npy", {"token_budget": 0}, "`token_budget` must be a positive number"),
        ("v.npy", {"pooling": "last"}, "`pooling` must be the encoder's"),
    ],
)
def test_invalid_outputs_are_refused(
    out: str, options: dict[str, Any], message: str, encoder: LayerEncoder, tmp_path: Path
) -> None:
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(MidlayerError, match=message):
        embed(encoder, out=tmp_path / out, **{"inputs": TEXTS, **options})
    assert {path.name for path in tmp_path.iterdir()} == {"folder.npy"}


def test_encoders_whose_layers_cannot_be_read_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="but has the module Dense"):
        embed(
            tiny_folder("Llama"),
            TEXTS,
            tmp_path / "v.npy",
            device="cpu",
            center=[f"text {number}" for number in range(16)],
        )


@pytest.mark.long
@pytest.mark.parametrize("suffix", [".npy", ".safetensors", ".parquet"])
@pytest.mark.parametrize("count", [1000, 2000])
def test_a_full_disk_leaves_the_file_that_was_there_and_with_more_room_the_run_goes_on(
    count: int, suffix: str, encoder: LayerEncoder, small_disk: Path
) -> None:
    # Of five layers in one MiB, 2000 texts overfill the store; 1000 fit into it, and not beside it into the file.
    out = small_disk / f"v{suffix}"
    out.write_bytes(b"before")
    texts = [f"text {number}" for number in range(count)]
    with pytest.raises(DiskFullError, match="is full"):
        embed(encoder, texts, out)
    assert out.read_bytes() == b"before"
    assert {path.name for path in small_disk.iterdir()} == {out.name, f"{out.name}.part"}
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    embed(encoder, texts, out)
    assert read(out)[0].shape == (5, count, 32)
    assert not (small_disk / f"{out.name}.part").exists()
