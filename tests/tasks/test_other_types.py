"""Several labels per text, translations, and texts without labels: detected types and their scores."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import MultiLabelBinarizer

from midlayer_encoders.tasks import TaskFileError, TfidfEncoder, resolve_tasks
from midlayer_encoders.tasks.baselines import source_texts, task_texts
from midlayer_encoders.tasks.file_tasks import files_data
from midlayer_encoders.tasks.sources import own_texts, task_sources
from tests.others_warnings import MTEB
from tests.tasks.rows import ROWS, SENTENCES, write

pytestmark = MTEB


def evaluate(task: Any) -> float:
    encoder = TfidfEncoder(task_texts(task))
    return float(mteb.evaluate(encoder, task, cache=None, show_progress_bar=False)[0].get_score())


def test_several_labels_are_scored_by_the_five_nearest_texts(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS["MultilabelClassification"][::2] + ROWS["MultilabelClassification"][1::4])
    write(tmp_path / "test.jsonl", ROWS["MultilabelClassification"][3::4])
    (task,) = resolve_tasks(tmp_path)
    task.samples_per_label = 48  # trains on every row without sampling
    task.load_data()
    train, test = (task.dataset[split].to_dict() for split in ("train", "test"))
    encoder, binary = TfidfEncoder(task_texts(task)), MultiLabelBinarizer()
    test_labels = binary.fit_transform(test["label"])
    model = KNeighborsClassifier(5).fit(encoder.vectors(train["text"]), binary.transform(train["label"]))
    expected = model.score(encoder.vectors(test["text"]), test_labels)
    assert 0 < expected < 1
    assert evaluate(task) == pytest.approx(expected, abs=1e-4)
    assert task.metadata.main_score == "accuracy"


def test_split_of_rows_with_several_labels_has_every_label_in_both_halves(tmp_path: Path) -> None:
    rows = [*ROWS["MultilabelClassification"], *({"text": f"rare {n}", "labels": ["rare", "odd"]} for n in (1, 2))]
    splits = files_data(write(tmp_path / "mine.csv", rows)).splits
    train, test = splits["train"], splits["test"]
    assert sorted(train["text"] + test["text"]) == sorted(row["text"] for row in rows)
    counts = [
        [sum(label in row_labels for row_labels in split["label"]) for label in range(6)] for split in (train, test)
    ]
    assert all(
        abs(train_count - test_count) <= 1 or train_count + test_count > 12
        for train_count, test_count in zip(*counts, strict=True)
    )
    assert min(map(min, counts)) == 1  # the two rows of the rare label
    assert "the labels spread evenly" in files_data(tmp_path / "mine.csv").note


def test_translations_are_matched_by_the_nearest_sentence(tmp_path: Path) -> None:
    rows = [{"sentence1": text, "sentence2": " ".join([*text.split()[:-4], "more", "words"])} for text in SENTENCES]
    (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", rows))
    encoder = TfidfEncoder(task_texts(task))
    sources, targets = (encoder.vectors([row[side] for row in rows]) for side in ("sentence1", "sentence2"))
    matches = (sources @ (targets / np.linalg.norm(targets, axis=1, keepdims=True)).T).argmax(1)
    # The F1 of each sentence, which may be matched by its own and by others, averaged over all.
    expected = np.mean([2 * (matches[n] == n) / (1 + (matches == n).sum()) for n in range(len(rows))])
    assert 0 < expected < 1
    assert evaluate(task) == pytest.approx(expected, abs=1e-4)


def test_extra_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="sentence1, sentence2 and score or label"):
        files_data(write(tmp_path / "pairs.jsonl", [{**row, "grade": 1} for row in ROWS["BitextMining"]]))
    with pytest.raises(
        TaskFileError, match=r"has text, topic\. If topic holds the labels, pass label_column='topic' \(--label-"
    ):
        files_data(write(tmp_path / "texts.jsonl", [{"text": "a text", "topic": 1}]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "labels": ["x", 1.5]}, {"text": "b", "labels": []}], r"line 1: `labels` must be a list of labels"),
        ([{"text": "a", "labels": ["x", "x"]}, {"text": "b", "labels": []}], r"line 1: `labels` must be a list of labels"),
        ([{"text": "a", "labels": ["x"]}, {"text": "b", "labels": "y"}], "line 2: `labels` must be a list of labels.* but got 'y'"),
        ([{"text": f"{n}", "labels": ["x"]} for n in range(9)], "at least two different labels"),
        ([{"text": f"{n}", "labels": [["x", "y"][n % 2]]} for n in range(8)], r"must have 5 rows with a label or more to train on.* but has 4\. Add rows"),
    ],
)  # fmt: skip
def test_invalid_labels_are_refused(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        files_data(write(tmp_path / "mine.jsonl", rows))


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


def test_invalid_label_lists_and_translations_are_refused(tmp_path: Path) -> None:
    rows = [{"text": text, "labels": ["a", "a"] if n % 2 else ["b"]} for n, text in enumerate(SENTENCES)]
    with pytest.raises(TaskFileError, match=r"`labels` must be a list of labels, each once, .* but got \['a', 'a'\]"):
        files_data(write(tmp_path / "twice.jsonl", rows))
    with pytest.raises(TaskFileError, match="must have two sentences or more, but has one: every search would find it"):
        files_data(write(tmp_path / "one.jsonl", ROWS["BitextMining"][:1]))
    numbered = [{"id": n, **row} for n, row in enumerate(ROWS["BitextMining"])]
    with pytest.raises(TaskFileError, match="sentence1 and sentence2 of translations, must stand alone"):
        files_data(write(tmp_path / "numbered.jsonl", numbered))
