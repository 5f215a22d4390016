from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from midlayer_encoders.cli._demo_digits import Digits, read_digits, train_digit_model
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


def test_digits_are_real_and_split() -> None:
    train, test = read_digits()
    assert (len(train.images), len(test.images)) == (1437, 360)
    assert set(train.labels) == set(test.labels) == set(range(10))
    assert train.images[0].size == (16, 16)
    assert np.asarray(train.images[0]).max() > 200


@pytest.mark.slow
def test_digit_model_learns_and_leaves_the_generator_unchanged(tmp_path: Path) -> None:
    digits = read_digits()[0].only(range(2))
    digits = Digits(digits.images[:96], digits.labels[:96])
    reports: list[tuple[str, int, int]] = []
    before = torch.get_rng_state()
    folder = train_digit_model(tmp_path, digits, epochs=4, progress=lambda *report: reports.append(report))
    assert torch.equal(torch.get_rng_state(), before)
    assert [report[1:] for report in reports] == [(epoch, 4) for epoch in range(1, 5)]
    vectors = LayerEncoder(folder, -1, device="cpu").encode(digits.images)
    labels = np.array(digits.labels)
    centers = np.stack([vectors[labels == digit].mean(axis=0) for digit in range(2)])
    nearest = np.linalg.norm(vectors[:, None] - centers, axis=2).argmin(axis=1)
    assert (nearest == labels).mean() > 0.9
    assert vectors.shape == (96, 96)
    np.testing.assert_array_equal(vectors, LayerEncoder(folder, -1, device="cpu").encode(digits.images))  # read twice


@pytest.mark.slow
def test_demo_vision_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from midlayer_encoders.cli import app

    result = CliRunner().invoke(app, ["demo-vision", "--out", str(tmp_path), "--epochs", "2"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert {path.name for path in tmp_path.iterdir()} == {
        "frame.parquet", "metrics.png", "model", "probes.png", "report.html",
    }  # fmt: skip
