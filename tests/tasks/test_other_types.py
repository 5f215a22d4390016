"""Texts without labels, and rows that are no task."""

import re
import shlex
from pathlib import Path

import pytest

from midlayer_encoders.tasks import TaskFileError, resolve_tasks
from midlayer_encoders.tasks.own_data import own_data
from midlayer_encoders.tasks.sources import own_texts, task_sources
from midlayer_encoders.tasks.tfidf import source_texts, task_texts
from tests.support.others_warnings import MTEB
from tests.tasks.rows import ROWS, SENTENCES, write

pytestmark = MTEB


def test_extra_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="sentence1, sentence2 and score or label"):
        own_data(write(tmp_path / "pairs.jsonl", [{"sentence1": "a text", "sentence2": "another", "grade": 1}]))
    with pytest.raises(
        TaskFileError, match=r"has text, topic\. .* text must stand alone without labels\. Name yours .* label_column="
    ):
        own_data(write(tmp_path / "texts.jsonl", [{"text": "a text", "topic": 1}]))


def test_translations_and_several_labels_per_text_are_refused(tmp_path: Path) -> None:
    pairs = [{"sentence1": text, "sentence2": text[::-1]} for text in SENTENCES]
    with pytest.raises(TaskFileError, match=r"has sentence1, sentence2\. A task has .*; or query and positive"):
        own_data(write(tmp_path / "pairs.jsonl", pairs))
    rows = [{"text": text, "label": ["a", "b"]} for text in SENTENCES]
    with pytest.raises(
        TaskFileError, match=r"`label` must be a label, a string or a whole number, but got \['a', 'b'\]"
    ):
        own_data(write(tmp_path / "labels.jsonl", rows))


def test_texts_without_labels_are_not_a_task_and_the_error_names_their_use(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.csv", [{"text": text} for text in (*SENTENCES, SENTENCES[0])])
    (source,) = task_sources(path)
    with pytest.raises(TaskFileError, match=r"holds texts without labels.*midlayer select MODEL --texts .*mine.csv"):
        source.make()
    hostile = write(tmp_path / "it's $(id).csv", [{"text": text} for text in SENTENCES])
    with pytest.raises(TaskFileError, match=re.escape(f"midlayer select MODEL --texts {shlex.quote(str(hostile))}`")):
        task_sources(hostile)[0].make()
    assert own_texts(path) == source.texts() == [*SENTENCES, SENTENCES[0]]  # one text per line of labels
    folder = write(tmp_path / "folder/test.csv", [{"sentences": text} for text in (*SENTENCES, SENTENCES[0])]).parent
    assert own_texts(folder) == own_texts(path)
    assert source_texts(source) == SENTENCES


@pytest.mark.parametrize("task_type", ROWS)
def test_own_texts_are_the_texts_of_the_task(tmp_path: Path, task_type: str) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS[task_type])
    assert set(own_texts(path)) == set(task_texts(resolve_tasks(path)[0]))
