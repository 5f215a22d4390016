"""Printed tables fit the terminal without splitting words."""

import re

import pytest

from midlayer_encoders.cli._output import print_layers, print_table

METRICS = ["prompt_entropy", "dataset_entropy", "curvature", "effective_rank", "infonce", "lidar", "dime"]


@pytest.mark.parametrize("width", [40, 60, 70, 80, 200])
def test_print_layers_narrow_terminal_splits_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_layers({name: {0: "1.234", 1: "1.234"} for name in METRICS}, "metrics")
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= width
    words = set(re.findall(r"[A-Za-z]+", output))
    assert words == {"metrics", "Layer"} | {word for name in METRICS for word in name.split("_")}


def test_wide_table_is_split_to_fit_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"Amazon Counterfactual Classification {n}" for n in range(12)]
    rows = [[str(layer), *(f"{layer + n / 10:.1f}" for n in range(12))] for layer in range(3)]
    print_table([["layer", *names], *rows], "Every layer", best="1")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("Every layer" in line for line in lines) == 1
    cells = [line.strip("│ ").split() for line in lines if line.startswith("│") and line.strip("│ ")[:1] in "012"]
    for layer in range(3):
        values = [cell for row in cells if row[0] == str(layer) for cell in row[1:] if cell != "│"]
        assert values == rows[layer][1:]  # no number is split or lost
