"""``midlayer embed`` equals the Python call, and refuses invalid arguments."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from tests.cli.calls import run
from tests.support.made_media import IMAGES
from tests.support.tiny_folders import TEXTS, Folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_layers_recipe_and_limit_match_the_encoder(tiny_folder: Folder, texts: Path, tmp_path: Path) -> None:
    model, out = tiny_folder("Llama"), tmp_path / "v.npy"
    flags = ["--layers", "1,0.5,-1", "--recipe", "one-word", "--norm", "none", "--limit", "4"]
    output = run("embed", model, "--texts", str(texts), "--out", str(out), "--device", "cpu", "--quiet", *flags)
    assert "Vectors of 4 texts are in" in output
    encoder = LayerEncoder(model, -1, device="cpu", recipe="one-word", norm="none")
    np.testing.assert_allclose(np.load(out), encoder.encode_layers(TEXTS[:4], [1, 2, 4]), atol=1e-5)
    about = json.loads((tmp_path / "v.npy.json").read_bytes())
    assert (about["recipe"], about["layers"]) == ("one-word", [1, 2, 4])


def test_embed_image_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number, image in enumerate(IMAGES):
        image.save(tmp_path / "images" / f"{number}.png")
    out = tmp_path / "v.safetensors"
    run("embed", tiny_folder("ViT"), "--images", str(tmp_path / "images"), "--out", str(out), "--device", "cpu")
    expected = LayerEncoder(tiny_folder("ViT"), -1, device="cpu").encode_layers(IMAGES, [3])[0]
    with safe_open(out, "np") as file:
        np.testing.assert_allclose(file.get_tensor("layer.3"), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "v.txt"], "must end in .npy"),
        (["--out", "nowhere/v.npy"], "must be in an existing folder"),
        (["--out", "v.npy", "--limit", "0"], "Invalid value for '--limit'"),
        (["--out", "v.npy", "--token-budget", "0"], "`token_budget` must be"),
        (["--out", "v.npy", "--layers", "7"], r"in \[0, 4\]"),
        (["--out", "v.npy", "--skip-bad"], "`skip_bad` has no effect for texts"),
    ],
)
def test_invalid_arguments_are_refused(
    flags: list[str], message: str, tiny_folder: Folder, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["embed", tiny_folder("Llama"), "--texts", str(texts), "--device", "cpu", *flags])
    assert result.exit_code
    assert re.search(message, f"{result.exception} {result.output}"), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["texts.txt"]


def test_empty_file_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n")
    command = ["embed", tiny_folder("Llama"), "--texts", str(tmp_path / "none.txt"), "--out", str(tmp_path / "v.npy")]
    assert "must hold at least one text" in str(CliRunner().invoke(app, command).exception)
