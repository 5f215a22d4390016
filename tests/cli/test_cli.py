import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app, main
from midlayer_encoders.comparing import ProgressionResult
from midlayer_encoders.sweeping import SweepResult
from tests.support.tiny_folders import TEXTS, Folder, save_tiny


def test_export_saves_the_encoder(tiny_folder: Folder, tmp_path: Path) -> None:
    arguments = ["export", tiny_folder("Llama"), "--layer", "0.5", "--out", str(tmp_path / "cut"), "--pooling", "last"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Layer 2 of 4" in result.output
    expected = LayerEncoder(tiny_folder("Llama"), 2, pooling="last", device="cpu").encode(TEXTS)
    np.testing.assert_array_equal(SentenceTransformer(str(tmp_path / "cut"), device="cpu").encode(TEXTS), expected)


@pytest.mark.parametrize(
    ("extra", "message"),
    [(["--layer", "9"], r"in [0, 4]"), (["--layer", "1", "--pooling", "maen"], "Did you mean 'mean'")],
)
def test_errors_are_one_line_and_exit_code_2(
    extra: list[str],
    message: str,
    tiny_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["export", tiny_folder("Llama"), "--out", str(tmp_path / "x"), *extra]
    monkeypatch.setattr(sys, "argv", ["midlayer", *command])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_model_error_is_one_line_in_a_shell(tiny_folder: Folder, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "midlayer_encoders.cli", "export", tiny_folder("Llama"), "--layer", "9"]
    process = subprocess.run([*command, "--out", str(tmp_path / "x")], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "in [0, 4]" in process.stderr
    assert "Traceback" not in process.stderr


def test_export_does_not_overwrite_a_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    result = CliRunner().invoke(app, ["export", tiny_folder("Llama"), "--layer", "1", "--out", str(tmp_path)])
    assert "must be a new or empty folder" in str(result.exception)


def test_import_is_quick_and_avoids_heavy_libraries() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import midlayer_encoders; s = time.perf_counter() - t;"
        "import midlayer_encoders.cli;"  # progress bars are disabled before their libraries are imported
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'mteb', 'lightning', 'tqdm'} & set(sys.modules);"
        "assert not heavy, heavy; assert s < 0.3, s; dir(midlayer_encoders)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_wrong_names_are_attribute_errors() -> None:
    import midlayer_encoders

    with pytest.raises(AttributeError, match="has no attribute 'LayerEnkoder'"):
        _ = midlayer_encoders.LayerEnkoder  # type: ignore[attr-defined]


@pytest.mark.long
def test_sweep_report_and_cache(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [
        {"sentence1": text, "sentence2": next_text, "score": n}
        for n, (text, next_text) in enumerate(itertools.pairwise(TEXTS))
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
    assert " scores " in result.output
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert SweepResult.load(out).to_html().read_text() == page


def test_failed_task_sets_the_exit_code(tiny_folder: Folder, tmp_path: Path) -> None:
    path = tmp_path / "near.jsonl"
    rows = [{"sentence1": f"one {n}", "sentence2": f"two {n}", "score": n % 3} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    tasks = f"{path},STS12"  # the data of the second is on the hub
    command = ["sweep", tiny_folder("Llama"), "--tasks", tasks, "--out", str(tmp_path / "out"), "--layers", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, [*command, "--device", "cpu", "--metrics", "none", "--workers", "1"])
    assert result.exit_code == 1, (result.output, result.exception)
    assert "STS12 failed" in result.output


@pytest.mark.long
def test_failed_checkpoint_sets_the_exit_code_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressionResult, "plots", lambda self: {})  # they take longer than everything else
    for step in (1, 2, 3):
        save_tiny("Llama", tmp_path / "run" / f"step{step}", seed=step)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    command = ["progression", str(tmp_path / "run"), "--texts", str(tmp_path / "texts.txt"), "--layers", "1,2"]
    command += ["--metrics", "curvature", "--device", "cpu", "--out", str(tmp_path / "out")]
    weights = tmp_path / "run" / "step2" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(b"torn")
    failed_run = CliRunner().invoke(app, command)
    assert failed_run.exit_code == 1, (failed_run.output, failed_run.exception)
    assert "step2 failed, " in failed_run.output
    saved = pl.read_parquet(tmp_path / "out" / "frame.parquet")
    assert set(saved["revision"]) == {"step1", "step3"}
    weights.write_bytes(good)
    complete_run = CliRunner().invoke(app, command)
    assert complete_run.exit_code == 0, (complete_run.output, complete_run.exception)
    assert "step2 failed" not in complete_run.output
    frame = pl.read_parquet(tmp_path / "out" / "frame.parquet")
    assert frame.filter(pl.col("revision") != "step2").equals(saved)
    assert frame.height == 6


def test_invalid_task_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "midlayer_encoders.cli", "sweep", str(tmp_path), "--tasks", "./nowhere.jsonl"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 2
    assert "nowhere.jsonl" in process.stderr


def test_metrics_without_out_writes_a_page_that_says_what_was_measured(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tests/docs`` runs the other commands without ``--out``, as printed on the pages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    model = tiny_folder("Llama")
    command = ["metrics", model, "--texts", "texts.txt", "--metrics", "curvature", "--layers", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "midlayer-results" / f"metrics-{Path(model).name}"
    assert (folder / "metrics.parquet").is_file()
    page = (folder / "report.html").read_text()
    assert f'<p class="verdict">Measured on {len(TEXTS)} texts in 1 pass.</p>' in page
