"""Which rows a task is made of, worked out by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders.tasks import docstrings
from midlayer_encoders.tasks.docstrings import SHELVES, Entry
from midlayer_encoders.tasks.file_tasks import files_data
from midlayer_encoders.tasks.task_data import TaskData

FILES = {"a.py": 12, "b.py": 5, "c.py": 3}
"""Objects in each file of each made-up shelf: as many as the built-in tasks take of one."""

Columns = Mapping[str, Sequence[Any]]


def text_of(what: str, *place: object) -> str:
    return "|".join([what, *map(str, place)])


def place_of(text: str) -> list[str]:
    """Return library, shelf, file and object of a made-up text."""
    return text.split("|")[1:]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the built-in tasks of objects whose texts say where they are, since reading real ones takes seconds."""
    places = [
        (library, shelf, file, str(number))
        for library in SHELVES
        for shelf in SHELVES[library]
        for file, count in FILES.items()
        for number in range(count)
    ]
    made = tuple(Entry(*place, text_of("summary", *place), text_of("description", *place)) for place in places)
    monkeypatch.setattr(docstrings, "entries", lambda: made)
    monkeypatch.setattr(docstrings, "_pool", docstrings._pool.__wrapped__)


def rows_of(label: str) -> Mapping[str, Columns]:
    return docstrings.builtin_data.__wrapped__(label).splits


@pytest.mark.usefixtures("made_up")
def test_the_built_in_classification_tests_on_the_objects_that_it_does_not_train_on() -> None:
    splits = rows_of("DocstringLibraryClassification")
    texts = [text for split in ("train", "test") for text in splits[split]["text"]]
    shelves = sum(map(len, SHELVES.values()))
    assert len(texts) == len(set(texts)) == 2 * 20 * shelves
    objects = {split: {tuple(place_of(text)) for text in splits[split]["text"]} for split in ("train", "test")}
    assert not objects["train"] & objects["test"]
    for places in objects.values():  # half of each shelf
        assert set(Counter(place[:2] for place in places).values()) == {10}
    for columns in splits.values():
        libraries = [list(SHELVES)[label] for label in columns["label"]]
        assert libraries == [place_of(text)[0] for text in columns["text"]]


@pytest.mark.usefixtures("made_up")
def test_wrong_descriptions_are_of_the_same_file_as_long_as_it_has_any() -> None:
    columns = rows_of("DocstringDescriptionReranking")["test"]
    for query, negative in zip(columns["query"], columns["negative"], strict=True):
        library, shelf, file, _ = place_of(query)
        near = min(FILES[file] - 1, 9)  # 9 of a.py, 4 of b.py, 2 of c.py
        places = [place_of(text) for text in negative]
        assert [place[:3] == [library, shelf, file] for place in places] == [True] * near + [False] * (9 - near)
        assert all(place[:2] == [library, shelf] for place in places)
    columns = rows_of("DocstringSameObjectPairs")["test"]
    for one, other, label in zip(columns["sentence1"], columns["sentence2"], columns["labels"], strict=True):
        assert place_of(one)[:3] == place_of(other)[:3]
        assert (place_of(one) == place_of(other)) == label


def test_whole_numbers_below_zero_are_labels_in_csv(tmp_path: Path) -> None:
    # Numbered in their order, -10 < -9 < 2; those below zero left as strings would be of another kind than 2.
    labels = [2, -10, -9, -10, 2, -9]
    lines = "".join(f"text {row},{label}\n" for row, label in enumerate(labels))
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(f"text,label\n{lines}")
    splits = files_data(tmp_path).splits
    assert splits["train"]["label"] == splits["test"]["label"] == [2, 0, 1, 0, 2, 1]
    below = tmp_path / "below.csv"
    below.write_text("sentences,labels\na,-2\nb,-10\nc,-1\n")  # as strings: "-1", "-10", "-2"
    assert files_data(below).splits["test"]["labels"] == [1, 0, 2]


def test_a_task_is_renamed_when_a_row_a_type_or_a_setting_changes() -> None:
    rows = {"sentences": ["a", "b", "c"], "labels": [0, 1, 1]}
    settings = {"n_clusters": 5, "max_documents_per_cluster": 3}
    data = TaskData(
        label="mine", type="Clustering", splits={"test": rows}, description="", origin="files", settings=settings
    )
    others = [
        replace(data, settings={}),
        replace(data, settings={"n_clusters": 5}),
        replace(data, settings=settings | {"n_clusters": 6}),
        replace(data, settings=settings | {"max_documents_per_cluster": 2}),
        replace(data, splits={"test": rows | {"labels": [0, 1, 0]}}),
        replace(data, splits={"train": rows}),
        replace(data, type="Classification"),
    ]
    assert len({one.name for one in (data, *others)}) == 8
    assert len({one.revision for one in (data, *others)}) == 8
    same = replace(data, settings=dict(reversed(settings.items())), description="Other words.", note="A note.")
    assert same.name == data.name
