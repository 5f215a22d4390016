"""The rows of tasks, computed by hand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.quality.docstring_texts.tasks import builtin_tasks
from midlayer_encoders.tasks.docstrings import Entry
from midlayer_encoders.tasks.own_data import own_data
from midlayer_encoders.tasks.task_data import TaskData

SHELVES = {"first": ["a", "b"], "second": ["a"]}
"""The subjects of each synthetic library."""
FILES = {"a.py": 12, "b.py": 5, "c.py": 3}
"""Number of objects in each file of each synthetic shelf: as many as the built-in tasks use."""

Columns = Mapping[str, Sequence[Any]]


def make_text(kind: str, *location: object) -> str:
    return "|".join([kind, *map(str, location)])


def parse_location(text: str) -> list[str]:
    """Return library, shelf, file and object of a synthetic text."""
    return text.split("|")[1:]


def builtin_splits(label: str) -> Mapping[str, Columns]:
    """Return the rows of a built-in task of objects whose texts name their location."""
    locations = [
        (library, shelf, file, str(number))
        for library in SHELVES
        for shelf in SHELVES[library]
        for file, count in FILES.items()
        for number in range(count)
    ]
    entries = [
        Entry(*location, make_text("summary", *location), make_text("description", *location)) for location in locations
    ]
    return builtin_tasks(entries, 20)[label]["splits"]  # type: ignore[no-any-return]


def test_builtin_classification_tests_on_other_objects_than_it_trains_on() -> None:
    splits = builtin_splits("DocstringLibraryClassification")
    texts = [text for split in ("train", "test") for text in splits[split]["text"]]
    shelves = sum(map(len, SHELVES.values()))
    assert len(texts) == len(set(texts)) == 2 * 20 * shelves
    objects = {split: {tuple(parse_location(text)) for text in splits[split]["text"]} for split in ("train", "test")}
    assert not objects["train"] & objects["test"]
    for locations in objects.values():  # half of each shelf
        assert set(Counter(location[:2] for location in locations).values()) == {10}
    for columns in splits.values():
        libraries = [list(SHELVES)[label] for label in columns["label"]]
        assert libraries == [parse_location(text)[0] for text in columns["text"]]


def test_negative_descriptions_are_of_the_same_file_if_possible() -> None:
    columns = builtin_splits("DocstringDescriptionReranking")["test"]
    for query, negative in zip(columns["query"], columns["negative"], strict=True):
        library, shelf, file, _ = parse_location(query)
        num_same_file = min(FILES[file] - 1, 9)  # 9 of a.py, 4 of b.py, 2 of c.py
        locations = [parse_location(text) for text in negative]
        assert [location[:3] == [library, shelf, file] for location in locations] == [True] * num_same_file + [
            False
        ] * (9 - num_same_file)
        assert all(location[:2] == [library, shelf] for location in locations)
    columns = builtin_splits("DocstringSameObjectPairs")["test"]
    for summary, description, label in zip(columns["sentence1"], columns["sentence2"], columns["labels"], strict=True):
        assert parse_location(summary)[:3] == parse_location(description)[:3]
        assert (parse_location(summary) == parse_location(description)) == label


def test_negative_numbers_are_labels_in_csv(tmp_path: Path) -> None:
    # Numbered in order, -10 < -9 < 2; negative numbers left as strings would have another type than 2.
    labels = [2, -10, -9, -10, 2, -9]
    lines = "".join(f"text {row},{label}\n" for row, label in enumerate(labels))
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(f"text,label\n{lines}")
    splits = own_data(tmp_path).splits
    assert splits["train"]["label"] == splits["test"]["label"] == [2, 0, 1, 0, 2, 1]
    path = tmp_path / "below.csv"
    path.write_text("sentences,labels\na,-2\nb,-10\nc,-1\n")  # as strings: "-1", "-10", "-2"
    assert own_data(path).splits["test"]["labels"] == [1, 0, 2]


def test_task_name_changes_with_rows_type_and_settings() -> None:
    rows = {"sentences": ["a", "b", "c"], "labels": [0, 1, 1]}
    settings = {"n_clusters": 5, "max_documents_per_cluster": 3}
    data = TaskData(
        label="mine", type="Clustering", splits={"test": rows}, description="", origin="files", settings=settings
    )
    changed = [
        replace(data, settings={}),
        replace(data, settings={"n_clusters": 5}),
        replace(data, settings=settings | {"n_clusters": 6}),
        replace(data, settings=settings | {"max_documents_per_cluster": 2}),
        replace(data, splits={"test": rows | {"labels": [0, 1, 0]}}),
        replace(data, splits={"train": rows}),
        replace(data, type="Classification"),
    ]
    assert len({task_data.name for task_data in (data, *changed)}) == 8
    assert len({task_data.revision for task_data in (data, *changed)}) == 8
    equivalent = replace(data, settings=dict(reversed(settings.items())), description="Other words.", note="A note.")
    assert equivalent.name == data.name
