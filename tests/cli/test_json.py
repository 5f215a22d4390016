"""``--json`` prints one JSON object."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub
import numpy as np
import pytest
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder, sweeping
from midlayer_encoders.cli import app, main
from midlayer_encoders.cli._output import to_json
from midlayer_encoders.sweeping import SweepResult
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder
from tests.tasks.rows import ROWS

pytestmark = MTEB


def run_json(*arguments: object) -> Any:
    """Return the parsed output of a command with ``--json``, which must be one line."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


def test_json_of_sweep(tiny_folder: Folder, tmp_path: Path) -> None:
    model, task, out = tiny_folder("Llama"), tmp_path / "near.jsonl", tmp_path / "out"
    task.write_text("\n".join(map(json.dumps, ROWS["STS"])))
    arguments = ("sweep", model, "--tasks", task, "--out", out, "--metrics", "none", "--workers", 1, "--device", "cpu")
    sweep_json, result = run_json(*arguments), SweepResult.load(out)
    assert (sweep_json["best_layer"], sweep_json["folder"], sweep_json["failures"]) == (result.best(), str(out), {})
    (curve,) = result.curves.tasks
    assert sweep_json["tasks"]["near"]["layers"] == {str(layer): score for layer, score in curve.points.items()}
    assert Path(sweep_json["report"]).is_file()
    assert f"--layer {result.best()} " in sweep_json["export"]["shell"]


def test_json_of_select_export_and_embed(tiny_folder: Folder, texts: Path, tmp_path: Path) -> None:
    model = tiny_folder("Llama")
    selection = run_json("select", model, "--texts", texts, "--device", "cpu")
    assert selection["layer"] == next(
        choice["layer"] for choice in selection["choices"] if choice["rule"] == selection["rule"]
    )
    assert f"layer={selection['layer']})" in selection["export"]["python"]
    result = run_json("export", model, "--layer", 2, "--out", tmp_path / "cut")
    assert (result["layer"], result["num_layers"], result["folder"]) == (2, 4, str(tmp_path / "cut"))
    assert result["parameters"] == sum(weights.numel() for weights in LayerEncoder(model, 2, device="cpu").parameters())
    embedded = run_json("embed", model, "--texts", texts, "--out", tmp_path / "v.npy", "--device", "cpu")
    assert (embedded["inputs"], np.load(embedded["path"]).shape[:2]) == (len(TEXTS), (5, len(TEXTS)))


def test_nonfinite_numbers_are_null_in_json() -> None:
    assert to_json({"a": [math.nan, math.inf, 1], "b": Path("x")}) == {"a": [None, None, 1], "b": "x"}


def test_token_is_in_no_error_and_no_file(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client's error can contain the header it was about to send."""
    secret = "hf_thisisasecrettoken"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sys, "argv", ["midlayer", "sweep", "someone/thing", "--tasks", "builtin"])

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(f"Illegal header value b'Bearer {secret}'")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    with pytest.raises(SystemExit) as exit_info:
        main()
    output = capsys.readouterr()
    assert exit_info.value.code == 1
    assert "hf download someone/thing" in output.err
    assert "Bearer hf_…" in output.err
    assert secret not in output.err + output.out
    task = tmp_path / "near.jsonl"
    task.write_text("\n".join(map(json.dumps, ROWS["STS"])))
    monkeypatch.setattr(sweeping.mteb_jobs, "_evaluate", refuse)
    result = sweeping.sweep(
        tiny_folder("Llama"),
        str(task),
        out=tmp_path / "out",
        settings=sweeping.SweepSettings(scoring="mteb", workers=1),
        device="cpu",
    )
    (failure,) = result.failures.values()
    assert "Bearer hf_…" in failure
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
