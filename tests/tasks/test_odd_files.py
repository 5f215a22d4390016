"""Unusual files are read correctly, or refused with the file, the line and the fix."""

import gzip
import json
import os
from pathlib import Path

import pytest

from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.tasks import TaskFileError, resolve_tasks
from midlayer_encoders.tasks.own_data import own_data
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tables import read_table
from midlayer_encoders.tasks.text_lists import read_texts
from tests.fuzz.running import in_time
from tests.tasks.rows import ROWS, write

ROW = b'{"text": "a", "label": 1}\n'


def test_labels_007_and_7_are_different(tmp_path: Path) -> None:
    path = tmp_path / "agents.csv"
    path.write_text("text,label\n" + "".join(f"text {n},{('007', '7')[n % 2]}\n" for n in range(8)))
    assert set(read_table(path).columns["label"]) == {"007", "7"}
    assert sorted(own_data(path).splits["train"]["label"]) == [0, 0, 1, 1]
    path.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(8)))
    assert set(read_table(path).columns["label"]) == {0, 1}


@pytest.mark.parametrize("label", ["1" * 5000, "-0", "+1", "1_0", "\u0661"])
def test_digit_label_that_is_not_a_plain_number_is_a_string(tmp_path: Path, label: str) -> None:
    (tmp_path / "a.csv").write_text(f"text,label\na,{label}\nb,1\n", encoding="utf8")
    assert read_table(tmp_path / "a.csv").columns["label"] == [label, "1"]


def test_json_lines_end_only_at_newlines(tmp_path: Path) -> None:
    odd = "one\u2028two\u2029three\x85four\x0cfive"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": odd, "label": 1}, ensure_ascii=False) + "\n", encoding="utf8")
    assert read_table(tmp_path / "a.jsonl").columns == {"text": [odd], "label": [1]}
    (tmp_path / "a.txt").write_text(f"{odd}\nnext", encoding="utf8")
    assert read_texts(tmp_path / "a.txt") == [odd, "next"]


def test_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": ROW, "a.csv": b"text,label\na,1\n", "a.txt": b"a\n"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read_texts(tmp_path / "a.txt") == ["a"]
    for name in ("a.csv", "a.jsonl"):
        assert read_table(tmp_path / name).columns == {"text": ["a"], "label": [1]}


REFUSED = {
    "half an emoji": (".jsonl", ROW + b'{"text": "cut \\ud83d", "label": 1}', "line 2: `text` must be a string"),
    "5,000 digits": (".jsonl", ROW + b'{"text": "a", "label": ' + b"1" * 5000 + b"}", "line 2: .* Exceeds the limit"),
    "deep nesting": (".jsonl", ROW + b'{"text": ' + b"[" * 99_999, "line 2: .* recursion"),
    "a column twice": (".csv", b"text,label,text\na,1,b\n", "line 1: has two columns named 'text'. Rename or remove"),
    "a quote that never ends": (".csv", b'text,label\n"a\nb",1\n"c,0\nd,1\n', "line 4: cannot be read as CSV"),
    "a blank text after a line break": (".csv", b'text,label\n"a\nb",1\n" ",0\n', "line 4: `text` must be a string"),
    "UTF-16": (".jsonl", ROW.decode().encode("utf-16"), "line 1: .* UTF-16, compressed, or not text"),
    "UTF-16 without a mark": (".csv", "text,label\n".encode("utf-16-le"), "line 1: .* UTF-16, compressed, or not text"),
    "Latin-1": (".csv", b"text,label\na,1\ncaf\xe9,0\n", "line 3: .* byte 0xe9 .* Latin-1 .* iconv -f windows-1252"),
    "Latin-1 in JSON": (".jsonl", ROW + b'{"text": "caf\xe9"}\n', "line 2: must be UTF-8, but the byte 0xe9"),
    "a null character": (".csv", b"text,label\na,1\n\0,0\n", "line 3: must be UTF-8, but the byte 0x00"),
    "half an object": (
        ".jsonl",
        ROW + b'{"text" 5}',
        "line 2: .* cannot be read: Expecting ':' delimiter: line 1 column 9",
    ),
    "gzip": (".csv", gzip.compress(b"text,label\na,1\n"), "UTF-16, compressed, or not text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unreadable_files_are_refused_with_file_line_and_fix(tmp_path: Path, case: str) -> None:
    suffix, content, message = REFUSED[case]
    path = tmp_path / f"mine{suffix}"
    path.write_bytes(content)
    with pytest.raises(TaskFileError, match=rf"mine\{suffix}.*{message}"):
        own_data(path)


def test_gzip_bomb_is_not_decompressed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"0" * 2**20)
    with pytest.raises(TaskFileError, match="compressed"), in_time(1):
        own_data(path)


def test_reading_a_fifo_does_not_block(tmp_path: Path) -> None:
    from midlayer_encoders.cli._labeled_examples import read_examples
    from midlayer_encoders.reading.media_inputs import read_image

    for name in ("test.jsonl", "a.csv", "a.parquet", "a.txt", "a.png"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "test.csv")
    reads = [lambda path=tmp_path / name: task_sources(path) for name in ("test.jsonl", "a.csv", "a.parquet")]
    reads += [
        lambda: task_sources(tmp_path / "folder"),
        lambda: read_texts(tmp_path / "a.txt"),
        lambda: read_image(tmp_path / "a.png"),
    ]
    reads += [lambda: read_examples(tmp_path / "a.csv", ["text"])]
    for call in reads:
        with pytest.raises(MidlayerError, match="must be a regular file, but is a folder, a pipe"), in_time(2):
            call()


def test_long_task_name_is_shortened_to_a_valid_file_name(tmp_path: Path) -> None:
    import mteb
    from mteb.cache import ResultCache

    from midlayer_encoders.tasks import TfidfEncoder
    from midlayer_encoders.tasks.tfidf import task_texts

    for name in ("n" * 240, "名" * 80):
        write(tmp_path / name / "test.jsonl", ROWS["STS"])
        (task,) = resolve_tasks(tmp_path / name)
        assert task.metadata.name.startswith(name[:40])
        mteb.evaluate(
            TfidfEncoder(task_texts(task)), task, cache=ResultCache(tmp_path / "cache"), show_progress_bar=False
        )
    assert len(list((tmp_path / "cache").rglob("nnnn*.json"))) == 1


@pytest.mark.parametrize("name", ["a" * 300 + ".csv", "/" + "a/" * 3000, "no\0where.csv", "~nobody-here/a.csv"])
def test_invalid_path_does_not_exist(name: str) -> None:
    with pytest.raises(OptionError, match="paths that exist, but there is no"):
        task_sources(name)
    with pytest.raises(OptionError, match="must be a file, but there is none"):
        read_texts(name)


def test_dangling_link_does_not_hide_other_files(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", ROWS["STS"])
    (tmp_path / "notes.md").symlink_to(tmp_path / "gone")
    assert task_sources(tmp_path)
    (tmp_path / "train.csv").symlink_to(tmp_path / "gone")
    assert task_sources(tmp_path)


def test_empty_task_name_is_refused() -> None:
    with pytest.raises(OptionError, match="one of them is empty"):
        task_sources(["", "nowhere.csv"])
