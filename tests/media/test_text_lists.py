"""Real-world text files: encodings, line ends, blank lines, fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.media.text_lists import read_texts, wikitext_paragraphs

LINES = ["Zürich \u2013 naïve café", "日本語の文", "emoji 🙂 here", "plain"]


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "not ended"])
def test_lines_of_any_script_with_either_line_end(end: str, last: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((end.join(LINES) + end * last).encode("utf8"))
    assert read_texts(path) == LINES
    assert read_texts(str(path)) == LINES
    rows = [json.dumps({"body": line, "id": n}, ensure_ascii=bool(n % 2)) for n, line in enumerate(LINES)]
    (tmp_path / "a.jsonl").write_bytes((end.join(rows) + end * last).encode("utf8"))
    assert read_texts(tmp_path / "a.jsonl", field="body") == LINES


def test_blank_lines_and_fields_are_skipped_and_spaces_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\none \n\t\n  \n two\n\n")
    assert read_texts(tmp_path / "a.txt") == ["one ", " two"]
    rows = ["", '{"t": "one"}', '{"t": "  "}', "", '{"t": ""}', '{"t": " two\\nlines"}', ""]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert read_texts(tmp_path / "a.jsonl", field="t") == ["one", " two\nlines"]


def test_named_field_is_read_and_invalid_line_is_numbered(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson"
    path.write_text('{"q": "question", "a": "answer"}\n\n{"q": "other", "a": "reply"}\n')
    assert (read_texts(path, field="q"), read_texts(path, field="a")) == (["question", "other"], ["answer", "reply"])
    path.write_text('{"q": "question"}\n\n{"a": "no question"}\n')
    with pytest.raises(OptionError, match=r"every line of a\.ndjson, but line 3 has a"):
        read_texts(path, field="q")
    path.write_text('{"q": "question"}\n["q"]\n')
    with pytest.raises(OptionError, match="line 2: must be one JSON object"):
        read_texts(path, field="q")
    path.write_text('{"q": "question"}\n\n{"q": null}\n')
    with pytest.raises(OptionError, match=r"must hold text, but line 3 of a\.ndjson has None"):
        read_texts(path, field="q")
    with pytest.raises(OptionError, match=r"`field` must name the field with the text in a\.ndjson, which has q\."):
        read_texts(path)


def test_field_implies_json_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text('{"body": "a text"}\n')
    assert read_texts(tmp_path / "rows.txt", field="body") == ["a text"]
    assert read_texts(tmp_path / "rows.txt") == ['{"body": "a text"}']


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
