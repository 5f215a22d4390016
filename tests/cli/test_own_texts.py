"""Your own data as ``--texts``."""

from pathlib import Path

import pytest

from midlayer_encoders.cli._arguments import TextData
from midlayer_encoders.tasks import TaskFileError
from tests.cli.calls import run, tables
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.tasks.rows import SENTENCES, write

pytestmark = MTEB


@pytest.mark.slow
def test_your_own_data_can_be_texts(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = write(tmp_path / "mine/test.csv", [{"text": text} for text in SENTENCES]).parent
    assert TextData().read_texts(folder) == SENTENCES
    output = run("metrics", tiny_folder("Llama"), "--texts", str(folder), "--metrics", "curvature", "--device", "cpu",
               "--out", str(tmp_path / "out"))  # fmt: skip
    assert tables(output)[0][0] == ["Layer", "curvature"]
    output = run("sweep", tiny_folder("Llama"), "--tasks", str(folder), "--metrics", "curvature", "--device", "cpu",
               "--out", str(tmp_path / "sweep"))  # fmt: skip
    assert "Nothing was scored. `midlayer select` chooses a layer without labels." in " ".join(output.split())
    output = run("select", tiny_folder("Llama"), "--texts", str(folder), "--rule", "fixed-depth", "--device", "cpu")
    assert "Export it:" in output


def test_text_column_names_another_column(tmp_path: Path) -> None:
    rows = [{"question": text, "answer": "x"} for text in SENTENCES]
    question = TextData(text_column="question")
    for suffix in (".jsonl", ".csv", ".parquet"):
        assert question.read_texts(write(tmp_path / f"mine{suffix}", rows)) == SENTENCES
    for suffix in (".jsonl", ".csv"):
        with pytest.raises(TaskFileError, match=r"but has question, answer\. .*Name yours .*\(--text-column"):
            TextData().read_texts(tmp_path / f"mine{suffix}")
    others = [{"id": n, "text": text, "label": n % 2} for n, text in enumerate(SENTENCES)]
    assert TextData().read_texts(write(tmp_path / "others.csv", others)) == SENTENCES  # in the order of the rows
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\ntwo\n")
    assert TextData().read_texts(lines) == ["one", "two"]
