"""Vectors of many layers in files, compared with the encoder: contents, description and invalid calls."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors import safe_open

from midlayer_encoders import LayerEncoder, embed
from midlayer_encoders.errors import DiskFullError, MidlayerError, OptionError
from midlayer_encoders.vectors import embedding
from tests.made_media import IMAGES, WAVEFORMS
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]

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
    monkeypatch.setattr(embedding, "_CHUNK", 3)  # so that a chunk ends within a block
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


@pytest.mark.parametrize("options", [{}, {"recipe": "one-word", "pooling": "mean", "template_tokens": False}])
def test_states_of_tokens_pool_to_the_vectors(options: dict[str, Any], tiny_folder: Folder, tmp_path: Path) -> None:
    full_encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", **options)
    folder = embed(full_encoder, TEXTS, tmp_path / "states", layers=[1, 4], tokens=True, token_budget=64)
    index = json.loads((folder / "index.json").read_bytes())
    rows: dict[int, list[np.ndarray]] = {1: [], 4: []}
    for shard in index["shards"]:
        with safe_open(folder / shard["file"], "np") as file:
            offsets, counted = file.get_tensor("offsets"), file.get_tensor("counted")
            for layer, means in rows.items():
                states = file.get_tensor(f"layer.{layer}")
                spans = [slice(*pair) for pair in np.stack([offsets[:-1], offsets[1:]], axis=1).tolist()]
                means += [states[span][counted[span]].mean(axis=0) for span in spans]
    np.testing.assert_allclose(
        np.stack([*map(np.stack, rows.values())]), full_encoder.encode_layers(TEXTS, [1, 4]), atol=1e-5
    )
    assert index["format"] == "midlayer states 1"
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_states_of_a_last_layer_are_sentence_transformers_own(encoder: LayerEncoder, tmp_path: Path) -> None:
    folder = embed(encoder, TEXTS[:2], tmp_path / "states", layers=[-1], tokens=True)
    vectors = encoder.encode(TEXTS[:2], output_value="token_embeddings", batch_size=1)
    with safe_open(folder / "states-000000.safetensors", "np") as file:
        np.testing.assert_allclose(file.get_tensor("layer.4"), torch.cat(vectors).numpy(), atol=1e-5)
        assert file.get_tensor("offsets").tolist() == [0, len(TEXTS[0]), len(TEXTS[0]) + len(TEXTS[1])]


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("v.parqet", {}, "must end in .npy, .safetensors, .parquet.* Did you mean '.parquet'"),
        ("nowhere/v.npy", {}, "`out` must be in an existing folder"),
        ("folder.npy", {}, "is a folder: use another"),
        ("v.parquet", {"tokens": True}, "must be a new folder with `tokens`.* Name it 'v'"),
        ("full", {"tokens": True}, "must be a new or empty folder"),
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
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(MidlayerError, match=message):
        embed(encoder, out=tmp_path / out, **{"inputs": TEXTS, **options})
    assert {path.name for path in tmp_path.iterdir()} == {"folder.npy", "full"}


def test_encoders_whose_layers_cannot_be_read_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="but has the module Dense"):
        embed(tiny_folder("Llama"), TEXTS, tmp_path / "v.npy", device="cpu", center=TEXTS * 4)


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


def test_a_full_disk_leaves_no_folder_of_states(encoder: LayerEncoder, small_disk: Path) -> None:
    with pytest.raises(DiskFullError, match="is full"):
        embed(encoder, [f"text {number}" for number in range(400)], small_disk / "states", tokens=True)
    assert {path.name for path in small_disk.iterdir()} == {"states.part"}


def test_shards_hold_32_images_or_as_many_tokens_as_fit(
    encoder: LayerEncoder, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [IMAGES[number % len(IMAGES)] for number in range(65)]
    folder = embed(tiny_folder("ViT"), images, tmp_path / "images", layers=[1], tokens=True, device="cpu")
    shards = json.loads((folder / "index.json").read_bytes())["shards"]
    assert [(shard["first"], shard["inputs"]) for shard in shards] == [(0, 32), (32, 32), (64, 1)]
    texts = ["a" * count for count in (3, 2, 5, 6, 1)]  # a token for each letter, 2 layers of 32 numbers each
    monkeypatch.setattr(embedding, "_SHARD_BYTES", 5 * 4 * 32 * 2)
    monkeypatch.setattr(embedding, "_COUNTED", 2)
    folder = embed(encoder, texts, tmp_path / "texts", layers=[1, 4], tokens=True)
    index = json.loads((folder / "index.json").read_bytes())
    assert [(shard["first"], shard["inputs"]) for shard in index["shards"]] == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert (index["pooling"], index["layers"], index["inputs"]) == (None, [1, 4], 5)
    assert {path.name for path in folder.iterdir()} == {"index.json", *(shard["file"] for shard in index["shards"])}
