"""Your own data as ``--texts``."""

from pathlib import Path

import pytest

from midlayer_encoders.cli._arguments import TextData, read_texts
from midlayer_encoders.tasks import TaskFileError
from tests.cli.calls import run, tables
from tests.others_warnings import MTEB
from tests.tasks.rows import SENTENCES, write
from tests.tiny_folders import Folder

pytestmark = MTEB


@pytest.mark.slow
def test_your_own_data_can_be_texts(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine/test.csv", [{"text": text} for text in SENTENCES]).parent
    assert read_texts(folder, TextData()) == SENTENCES
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
        assert read_texts(write(tmp_path / f"mine{suffix}", rows), TextData(text_column="question")) == SENTENCES
    for suffix in (".jsonl", ".csv"):
        with pytest.raises(TaskFileError, match=r"but has question, answer\. If .*\(--text-column question\)"):
            read_texts(tmp_path / f"mine{suffix}", TextData())
    others = [{"id": n, "text": text, "label": n % 2} for n, text in enumerate(SENTENCES)]
    assert read_texts(write(tmp_path / "others.csv", others), TextData()) == SENTENCES  # in the order of the rows
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\ntwo\n")
    assert read_texts(lines, TextData()) == ["one", "two"]
