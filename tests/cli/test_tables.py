"""Printed tables fit the terminal without splitting words, and show without colors what is dim."""

import re

import pytest

from midlayer_encoders.cli._output import print_by_layer

METRICS = ["prompt_entropy", "dataset_entropy", "curvature", "effective_rank", "infonce", "lidar", "dime"]


@pytest.mark.parametrize("width", [40, 60, 70, 80, 200])
def test_print_by_layer_narrow_terminal_splits_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_by_layer({(layer, name): "1.234" for layer in range(2) for name in METRICS}, title="metrics")
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    words = set(re.findall(r"[a-z]+", output))
    assert words == {"metrics", "layer"} | {word for name in METRICS for word in name.split("_")}
