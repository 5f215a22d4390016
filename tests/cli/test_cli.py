from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app, main
from midlayer_encoders.comparing import ProgressionResult
from tests.tiny_folders import TEXTS, save_tiny

Folder = Callable[[str], str]


def test_export_writes_what_the_encoder_gives(tiny_folder: Folder, tmp_path: Path) -> None:
    arguments = ["export", tiny_folder("Llama"), "--layer", "0.5", "--out", str(tmp_path / "cut"), "--pooling", "last"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Layer 2 of 4" in result.output
    expected = LayerEncoder(tiny_folder("Llama"), 2, pooling="last", device="cpu").encode(TEXTS)
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path / "cut"), device="cpu").encode(TEXTS), expected)


@pytest.mark.parametrize(
    ("extra", "text"),
    [(["--layer", "9"], r"in [0, 4]"), (["--layer", "1", "--pooling", "maen"], "Did you mean 'mean'")],
)
def test_errors_are_one_line_and_exit_code_2(
    extra: list[str],
    text: str,
    tiny_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["export", tiny_folder("Llama"), "--out", str(tmp_path / "x"), *extra]
    monkeypatch.setattr(sys, "argv", ["midlayer", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    output = capsys.readouterr().err
    assert text in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_an_error_of_a_loaded_model_is_one_line_in_a_shell(tiny_folder: Folder, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midlayer_encoders.cli", "export", tiny_folder("Llama"), "--layer", "9"]
    done = subprocess.run([*command, "--out", str(tmp_path / "x")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "in [0, 4]" in done.stderr
    assert "Traceback" not in done.stderr


def test_export_does_not_write_over_a_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    result = CliRunner().invoke(app, ["export", tiny_folder("Llama"), "--layer", "1", "--out", str(tmp_path)])
    assert "must be a new or empty folder" in str(result.exception)


def test_import_is_quick_and_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import midlayer_encoders; s = time.perf_counter() - t;"
        "import midlayer_encoders.cli;"  # bars are turned off before what shows them is imported
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'mteb', 'lightning', 'tqdm'} & set(sys.modules);"
        "assert not heavy, heavy; assert s < 0.3, s; dir(midlayer_encoders)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_wrong_names_are_attribute_errors() -> None:
    import midlayer_encoders

    with pytest.raises(AttributeError, match="has no attribute 'LayerEnkoder'"):
        _ = midlayer_encoders.LayerEnkoder  # type: ignore[attr-defined]


def test_sweep_report_and_cache(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [
        {"sentence1": text, "sentence2": other, "score": n} for n, (text, other) in enumerate(itertools.pairwise(TEXTS))
    ]
    (tmp_path / "near.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    command = [
        "sweep",
        tiny_folder("Llama"),
        "--tasks",
        str(tmp_path / "near.jsonl"),
        "--out",
        str(out),
        "--device",
        "cpu",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, [*command, "--metrics", "curvature", "--workers", "1"])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Best layer:" in result.output
    before = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert (out / "report.html").read_text() == before
    listed = CliRunner().invoke(app, ["cache", str(out / "embeddings")])
    assert "Llama" in listed.output
    CliRunner().invoke(app, ["cache", str(out / "embeddings"), "--keep-gb", "0"])
    assert "Llama" not in CliRunner().invoke(app, ["cache", str(out / "embeddings")]).output


def test_a_failing_task_is_the_exit_code(tiny_folder: Folder, tmp_path: Path) -> None:
    command = ["sweep", tiny_folder("Llama"), "--tasks", "STS12", "--out", str(tmp_path / "out"), "--layers", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Its data is on the hub.
        result = CliRunner().invoke(app, [*command, "--device", "cpu", "--metrics", "none", "--workers", "1"])
    assert result.exit_code == 1, (result.output, result.exception)
    assert "STS12 failed" in result.output


@pytest.mark.usefixtures("quick_collector")
def test_a_failing_checkpoint_sets_the_exit_code_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressionResult, "plots", lambda self: {})  # they take longer than all the rest
    for step in (1, 2, 3):
        save_tiny("Llama", tmp_path / "run" / f"step{step}", seed=step)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    command = ["progression", str(tmp_path / "run"), "--texts", str(tmp_path / "texts.txt"), "--layers", "1,2"]
    command += ["--metrics", "curvature", "--device", "cpu", "--out", str(tmp_path / "out")]
    weights = tmp_path / "run" / "step2" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(b"torn")
    torn = CliRunner().invoke(app, command)
    assert torn.exit_code == 1, (torn.output, torn.exception)
    assert "step2 failed, " in torn.output
    saved = pl.read_parquet(tmp_path / "out" / "frame.parquet")
    assert set(saved["revision"]) == {"step1", "step3"}
    weights.write_bytes(good)
    whole = CliRunner().invoke(app, command)
    assert whole.exit_code == 0, (whole.output, whole.exception)
    assert "step2 failed" not in whole.output
    frame = pl.read_parquet(tmp_path / "out" / "frame.parquet")
    assert frame.filter(pl.col("revision") != "step2").equals(saved)
    assert frame.height == 6


def test_an_invalid_task_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "midlayer_encoders.cli", "sweep", str(tmp_path), "--tasks", "./nowhere.jsonl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nowhere.jsonl" in done.stderr


def test_metrics_lie_beside_a_sweep_when_no_folder_is_named(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/docs`` runs the other commands without ``--out``, as the pages print them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    model = tiny_folder("Llama")
    words = ["metrics", model, "--texts", "texts.txt", "--metrics", "curvature", "--layers", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "midlayer-results" / f"metrics-{Path(model).name}" / "metrics.parquet").is_file()
