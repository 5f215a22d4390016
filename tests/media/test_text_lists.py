"""Real-world text files: encodings, line ends, blank lines."""

from pathlib import Path

import pytest

from midlayer_encoders.tasks.text_lists import read_texts, wikitext_paragraphs

LINES = ["Zürich \u2013 naïve café", "日本語の文", "emoji 🙂 here", "plain"]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "not ended"])
def test_lines_of_any_script_with_either_line_end(end: str, last: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((end.join(LINES) + end * last).encode("utf8"))
    assert read_texts(path) == LINES
    assert read_texts(str(path)) == LINES


def test_blank_lines_are_skipped_and_spaces_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\none \n\t\n  \n two\n\n")
    assert read_texts(tmp_path / "a.txt") == ["one ", " two"]


def test_headings_of_every_level_are_removed_and_lengths_are_of_stripped_paragraphs() -> None:
    counted: list[str] = []

    def count(paragraph: str) -> int:
        counted.append(paragraph)
        return len(paragraph)

    lines = [
        " = A = \n",
        " = = B = = ",
        "  = = = C = = =",
        "=D=",
        " x = 1 ",
        "= open",
        "open =",
        "  12345  ",
        "1234",
        " ",
    ]
    assert wikitext_paragraphs(lines, count, least=5) == ["x = 1", "= open", "open =", "12345"]
    assert counted == ["x = 1", "= open", "open =", "12345", "1234"]
    assert wikitext_paragraphs(["a" * 29, "b" * 30], len) == ["b" * 30]
