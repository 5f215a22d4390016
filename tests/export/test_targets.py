"""``export_for``: arguments that it refuses, and the comparison of vectors."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.export._comparison import cosine, relative_error
from midlayer_encoders.extras.settings import require_packages
from tests.cli.calls import run
from tests.support.tiny_folders import TEXTS, Folder


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), 2, device="cpu")


def test_a_plain_folder_is_one_of_the_targets(encoder: LayerEncoder, tmp_path: Path) -> None:
    result = export_for(encoder, "sentence-transformers", tmp_path / "out")
    assert (result.target, result.folder, result.error) == ("sentence-transformers", tmp_path / "out", None)
    np.testing.assert_array_equal(SentenceTransformer(str(result.folder)).encode(TEXTS), encoder.encode(TEXTS))


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("onxx", {}, r"`target` must be one of .*Did you mean 'onnx'\?"),
        ("vllm", {"int8": True}, "`int8` cannot be combined with target='vllm'"),
        ("onnx", {"int8": "no"}, "`int8` must be True or False"),
        ("onnx", {"overwrite": 1}, "`overwrite` must be True or False"),
    ],
)
def test_invalid_arguments_are_refused(
    encoder: LayerEncoder, tmp_path: Path, target: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        export_for(encoder, target, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["sentence-transformers", "onnx", "gguf"])
def test_a_folder_that_holds_something_is_left_alone(encoder: LayerEncoder, tmp_path: Path, target: Any) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"must be a new or empty folder.*overwrite=True"):
        export_for(encoder, target, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("target", "package"), [("onnx", "onnxscript"), ("gguf", "gguf")])
def test_a_missing_package_is_named_with_the_line_that_installs_it(
    encoder: LayerEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MidlayerError, match=rf"pip install 'midlayer-encoders\[{target}\]'"):
        export_for(encoder, target, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_package_that_is_missing_is_named_among_the_required_ones() -> None:
    with pytest.raises(MidlayerError, match=r"'x' needs json and no_such_package, but no_such_package is not inst"):
        require_packages("x", "json", "no_such_package")


def test_distances_are_those_of_the_worst_row() -> None:
    vectors = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert relative_error(vectors, vectors) == 0
    assert relative_error(vectors, vectors + np.array([[0.0, 0.0], [0.0, 0.5]])) == pytest.approx(0.25)
    assert relative_error(vectors, vectors[:1]) == relative_error(vectors, vectors * np.nan) == np.inf
    assert relative_error(vectors * 0, vectors) == np.inf
    assert cosine(vectors, vectors * [[3.0], [2.0]]) == pytest.approx(1)
    assert cosine(vectors, np.array([[1.0, 1.0], [0.0, 1.0]])) == pytest.approx(0.5**0.5)
    assert cosine(vectors, vectors[:1]) == cosine(vectors, vectors * np.nan) == -1


def test_the_command_refuses_before_a_model_is_read(tmp_path: Path) -> None:
    line = ["export", "no/such-model", "--layer", "2", "--out", str(tmp_path / "out")]
    targets = "'sentence-transformers', 'vllm', 'onnx', 'gguf'"
    with pytest.raises(OptionError, match=f"`target` must be one of {targets}"):
        run(*line, "--for", "tflite")
    with pytest.raises(OptionError, match="`int8` cannot be combined with target='sentence-transformers'"):
        run(*line, "--int8")
