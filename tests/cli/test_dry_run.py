"""``midlayer sweep --dry-run``, and your own data as ``--texts``: the output in 80 columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midlayer_encoders.cli import app
from midlayer_encoders.cli._arguments import read_texts
from midlayer_encoders.tasks import TaskFileError
from tests.cli.calls import run, tables
from tests.others_warnings import MTEB
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tasks.test_beir import write_beir

Folder = Callable[[str], str]
pytestmark = MTEB


def test_dry_run_fits_80_columns_and_matches_json(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_beir(tmp_path / "search")
    write(tmp_path / "classes/train.jsonl", ROWS["Classification"])
    write(tmp_path / "classes/test.jsonl", ROWS["Classification"][:20])
    command = ["sweep", tiny_folder("Llama"), "--tasks", "./search,./classes", "--dry-run", "--device", "cpu"]
    result = CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    output = result.stdout
    assert max(map(len, output.splitlines())) <= 80
    for line in ("search: Retrieval (corpus, queries and qrels)", "  to embed  ", "  scored    all layers together"):
        assert line in output
    assert "time about 1 s for embedding; loading, scoring, metrics and baselines come on top" in " ".join(
        output.split()
    )
    assert not (tmp_path / "midlayer-results").exists()
    result = CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False)
    values = json.loads(result.stdout)
    assert [task["type"] for task in values["tasks"]] == ["Retrieval", "Classification"]
    assert values["store_bytes"] > 0


def test_dry_run_without_a_model_still_reports_the_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "near.jsonl", ROWS["STS"])
    result = CliRunner().invoke(app, ["sweep", str(tmp_path / "none"), "--tasks", str(path), "--dry-run"])
    assert result.exit_code == 1
    assert "near: STS (columns sentence1, sentence2, score)" in result.stdout
    assert "error" in result.stdout


@pytest.mark.slow
def test_your_own_data_can_be_texts(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine/test.csv", [{"text": text} for text in SENTENCES]).parent
    assert read_texts(folder, column=None) == SENTENCES
    output = run("metrics", tiny_folder("Llama"), "--texts", str(folder), "--metrics", "curvature", "--device", "cpu",
               "--out", str(tmp_path / "out"))  # fmt: skip
    assert tables(output)[0][0] == ["layer", "curvature"]
    output = run("sweep", tiny_folder("Llama"), "--tasks", str(folder), "--metrics", "curvature", "--device", "cpu",
               "--out", str(tmp_path / "sweep"))  # fmt: skip
    assert f"midlayer select {tiny_folder('Llama')} --texts {folder}" in output
    output = run("select", tiny_folder("Llama"), "--texts", str(folder), "--rule", "fixed-depth", "--device", "cpu")
    assert "Export it:" in output


def test_text_column_names_another_column(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": "x"} for text in SENTENCES]
    for suffix in (".jsonl", ".csv", ".parquet"):
        assert read_texts(write(tmp_path / f"mine{suffix}", rows), column="question") == SENTENCES
    for suffix in (".jsonl", ".csv"):
        with pytest.raises(TaskFileError, match=r"but has question, answer\. If .*\(--text-column question "):
            read_texts(tmp_path / f"mine{suffix}", column=None)
    others = [{"id": n, "text": text, "label": n % 2} for n, text in enumerate(SENTENCES)]
    assert read_texts(write(tmp_path / "others.csv", others), column=None) == SENTENCES  # in the order of the rows
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\ntwo\n")
    assert read_texts(lines, column=None) == ["one", "two"]
