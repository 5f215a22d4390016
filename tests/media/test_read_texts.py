from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks.text_lists import read_texts, wikitext_paragraphs


def test_lines_are_texts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert read_texts(tmp_path / "a.txt") == ["one", " two "]


def test_blank_lines_that_shift_later_rows_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \n")
    assert read_texts(tmp_path / "a.txt") == ["one", "two"]
    assert not caplog.text  # blank lines at the end shift none
    (tmp_path / "b.txt").write_text("one\n\n \ntwo\n\n")
    assert read_texts(tmp_path / "b.txt") == ["one", "two"]
    assert "b.txt: skipped 2 blank lines: row n is the n-th text, not the n-th line." in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "\n \n", "at least one text"),
        ("a.jsonl", '{"body": "x"}', "must be a file with a text per line, but a.jsonl has JSON"),
    ],
)
def test_invalid_files_name_the_fix(name: str, content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(OptionError, match=text):
        read_texts(tmp_path / name)


def test_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is none at"):
        read_texts(tmp_path / "none.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        read_texts(tmp_path / "b.txt")


def test_wikitext_headings_and_short_paragraphs_are_removed() -> None:
    lines = [" = Robert Boulter = ", " = = Career = = ", "", " He is an actor . ", "short", "a = b c d"]
    assert wikitext_paragraphs(lines, lambda line: len(line.split()), least=4) == ["He is an actor .", "a = b c d"]
