"""``midlayer board``: the table, the page, JSON, and the encoder for a budget."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from midlayer_encoders import board
from midlayer_encoders.cli import app
from midlayer_encoders.cli.find import parse_amount
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import shell_path
from tests.cli.calls import run, tables
from tests.report.made_runs import make_sweep


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_sweep(tmp_path / "runs/one", {"STS": [0.2, 0.6, 0.5]}, model="[red]m1")
    make_sweep(tmp_path / "runs/two", {"STS": [0.1, 0.3, 0.7], "B": [0.1, 0.1, 0.1]}, model="m2")
    return tmp_path / "runs"


@pytest.mark.long
def test_board_prints_the_table_the_page_and_the_code(runs: Path, tmp_path: Path) -> None:
    run("board", str(runs), "--out", str(tmp_path / "a folder"))
    assert (tmp_path / "a folder" / "board.html").is_file()
    output = run("board", str(runs), "--out", str(tmp_path / "board.html"))
    ((head, *rows),) = tables(output)
    assert head == ["run", "layer", "score", "parameters", "ms per text", "tokens per text", "bytes per vector"]
    assert rows == [["m2", "2", "70.0", "120", "3", "9.5", "32"], ["[red]m1", "1", "60.0", "110", "2", "9.5", "32"]]
    assert "Left out: B, not in [red]m1." in output
    assert output.splitlines()[-6:] == [
        "m2 at layer 2 scores 70.0 on STS, the highest of 2 runs. Its costs: 120 parameters, 3 ms per text, 9.5 tokens "
        "per text, 32 bytes per vector.",
        f"The report: {shell_path(tmp_path / 'board.html')}",
        "Export it: midlayer export m2 --layer 2 --out layer-2",
        "In Python:",
        "from midlayer_encoders import LayerEncoder",
        "LayerEncoder('m2', layer=2).save_pretrained(\"layer-2\")",
    ]
    assert (tmp_path / "board.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.long
def test_budget_reaches_the_selection_and_json_is_complete(runs: Path, tmp_path: Path) -> None:
    command = [
        "board",
        str(runs),
        "--out",
        str(tmp_path / "b.html"),
        "--max-params",
        "0.115k",
        "--max-ms",
        "2.5",
        "--json",
    ]
    output = json.loads(run(*command, "--max-bytes", "32"))
    assert output["chosen"]["run"] == "[red]m1"
    assert output["chosen"]["lines"]["shell"] == "midlayer export '[red]m1' --layer 1 --out layer-1"
    assert output["page"] == str(tmp_path / "b.html")
    result = board(runs, max_parameters=115, max_milliseconds=2.5, max_bytes=32)
    assert {key: output[key] for key in result.to_dict()} == json.loads(json.dumps(result.to_dict()))
    assert output["budget"] == {"parameters": 115, "milliseconds": 2.5, "bytes": 32}


@pytest.mark.long
def test_unmet_budget_still_writes_the_page(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"none is within 9 parameters: the nearest is \[red\]m1 at layer 0"):
        run("board", str(runs), "--out", str(tmp_path / "b.html"), "--max-params", "9")
    assert "the nearest is [red]m1 at layer 0" in (tmp_path / "b.html").read_text()


@pytest.mark.long
def test_json_lists_the_runs_if_the_budget_is_not_met(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError, match="none is within 9 parameters"):
        app(
            ["board", str(runs), "--out", str(tmp_path / "b.html"), "--max-params", "9", "--json"],
            standalone_mode=False,
        )
    output = json.loads(capsys.readouterr().out)
    assert output["chosen"] is None
    assert [entry["run"] for entry in output["runs"]] == ["m2", "[red]m1"]


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--max-params", "max_parameters"), ("--max-ms", "max_milliseconds"), ("--max-bytes", "max_bytes")],
)
def test_zero_budget_is_refused(flag: str, name: str, runs: Path) -> None:
    with pytest.raises(OptionError, match=f"`{name}` must be a finite number, .* but got 0"):
        run("board", str(runs), flag, "0")


@pytest.mark.parametrize("text", ["", "M", "-5", "5T", "1e6", "5 M M", "nan"])
def test_invalid_amounts_are_refused(text: str, runs: Path) -> None:
    with pytest.raises(OptionError, match=r"`--max-params` must be a number such as 100M, 1\.5B or 22000000"):
        run("board", str(runs), f"--max-params={text}")
    assert parse_amount("5 M") == 5e6


def test_board_does_not_import_model_libraries(runs: Path, tmp_path: Path) -> None:
    """Those imports take ten seconds."""
    code = (
        "import sys; from midlayer_encoders.cli import app\n"
        f"app(['board', {str(runs)!r}, '--out', {str(tmp_path / 'b.html')!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'mteb'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "[]"
