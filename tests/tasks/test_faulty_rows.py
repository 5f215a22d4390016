"""Rows without a text or label: all are named at once, under the user's names, or are left out."""

import logging
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from midlayer_encoders.tasks import TaskFileError, resolve_tasks
from midlayer_encoders.tasks.sources import own_labels, own_texts
from midlayer_encoders.tasks.tables import Columns
from midlayer_encoders.tasks.training_rows import read_pairs

LINES = ["message;topic", *(f"ticket {number};{'ab'[number % 2]}" for number in range(8))]
FAULTY = ["message;topic", ";a", *LINES[1:], " ;b", "no topic;"]
NAMES = {"text_column": "message", "label_column": "topic"}
PLACES = {"csv": "lines 2, 11: `message` .* line 12: `topic`", "frame": "rows 1, 10: `message` .* row 11: `topic`"}


def data(kind: str, lines: list[str], folder: Path) -> Any:
    """Return rows as a file or as a data frame with missing values."""
    path = folder / "tickets.csv"
    path.write_text("\n".join(lines))
    return path if kind == "csv" else pd.read_csv(path, sep=";")


@pytest.mark.parametrize("kind", PLACES)
def test_resolve_tasks_names_all_faults_of_a_table_at_once(kind: str, tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=f"{PLACES[kind]} .*or leave out rows .*drop_empty=True") as error:
        resolve_tasks(data(kind, FAULTY, tmp_path), **NAMES)
    assert "`text`" not in str(error.value)
    assert "`label`" not in str(error.value)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("labels", ["ab", "01"])
def test_resolve_tasks_without_empty_rows_equals_the_clean_table(
    kind: str, labels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, faulty = ([line.translate(str.maketrans("ab", labels)) for line in table] for table in (LINES, FAULTY))
    lines[0] = faulty[0] = "message;topic"
    (expected,) = resolve_tasks(data("csv", lines, tmp_path), **NAMES)
    with caplog.at_level(logging.WARNING):
        (actual,) = resolve_tasks(data(kind, faulty, tmp_path), **NAMES, drop_empty=True)
    digests = {task.metadata.name.rpartition("-")[2] for task in (actual, expected)}
    assert len(digests) == 1  # of the rows
    assert "left out 3 rows of 11 without `message` or `topic`" in caplog.text


def test_read_pairs_without_empty_rows_equals_the_clean_table(tmp_path: Path) -> None:
    expected = read_pairs(data("csv", LINES, tmp_path), Columns("message", "topic"))
    actual = read_pairs(data("csv", FAULTY, tmp_path), Columns("message", "topic", drop_empty=True))
    assert actual == expected


def test_own_labels_without_empty_texts_belong_to_the_texts(tmp_path: Path) -> None:
    path = data("csv", FAULTY, tmp_path)
    columns = Columns("message", "topic", drop_empty=True)
    texts, labels = own_texts(path, columns), own_labels(path, columns)
    expected = [tuple(line.split(";")) for line in LINES[1:]]
    assert list(zip(texts, labels, strict=True)) == [*expected, ("no topic", None)]


def test_resolve_tasks_of_empty_rows_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="is empty after leaving out 2 rows of 2 without `message` or `topic`"):
        resolve_tasks(data("csv", ["message;topic", ";a", "b;"], tmp_path), **NAMES, drop_empty=True)
