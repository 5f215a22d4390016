"""Data in memory is read by the rules of files: the same task, name and errors."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks import TaskFileError, resolve_tasks
from midlayer_encoders.tasks.sources import TextsSource, task_sources
from midlayer_encoders.tasks.tables import Columns
from midlayer_encoders.tasks.tfidf import source_texts
from tests.tasks.rows import ROWS, SENTENCES, write

FORMS: dict[str, Callable[[Any], Any]] = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "datasets": datasets.Dataset.from_list,
    "pyarrow": pa.Table.from_pylist,
    "columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
    "rows": list,
}
REVIEWS = ROWS["Classification"]
TEXTS, LABELS = [row["text"] for row in REVIEWS], [row["label"] for row in REVIEWS]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task_type", ROWS)
def test_data_in_memory_is_the_task_of_a_file_with_the_same_rows(tmp_path: Path, task_type: str, form: str) -> None:
    (from_file,) = task_sources(write(tmp_path / "data.jsonl", ROWS[task_type]))
    (source,) = task_sources(FORMS[form](ROWS[task_type]))
    assert source.name == from_file.name
    task, expected = source.make(), from_file.make()
    assert (task.metadata.type, task.metadata.revision) == (task_type, expected.metadata.revision)
    assert task.data.splits == expected.data.splits  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "data",
    [
        (TEXTS, LABELS),
        (np.array(TEXTS), np.array(LABELS)),
        (pd.Series(TEXTS), pd.Categorical(LABELS)),
        (pl.Series(TEXTS), pl.Series(LABELS)),
        tuple(datasets.Dataset.from_list(REVIEWS)[:].values()),
        list(zip(TEXTS, LABELS, strict=True)),
        [[text, label] for text, label in zip(TEXTS, LABELS, strict=True)],
        datasets.DatasetDict({"train": datasets.Dataset.from_list(REVIEWS)}),
        [pd.DataFrame(REVIEWS)],
    ],
    ids=lambda data: type(data[0] if isinstance(data, tuple) else data).__name__,
)
def test_texts_with_labels_are_a_classification(data: Any) -> None:
    (task,) = resolve_tasks(data)
    assert task.metadata.name == task_sources(REVIEWS)[0].name
    assert task.metadata.type == "Classification"


def test_numpy_labels_are_numbers() -> None:
    numbers = [LABELS.index(label) for label in LABELS]
    names = {task_sources((TEXTS, labels))[0].name for labels in (numbers, np.array(numbers), pd.Series(numbers))}
    assert len(names) == 1


@pytest.mark.parametrize("form", ["pandas", "polars", "datasets"])
def test_train_and_test_are_the_splits(form: str) -> None:
    parts = {"train": REVIEWS[::2], "test": REVIEWS[1::2], "validation": [{"text": "x", "label": "unseen"}]}
    data = {split: FORMS[form](rows) for split, rows in parts.items()}
    (task,) = resolve_tasks(datasets.DatasetDict(data) if form == "datasets" else data)
    splits = task.data.splits  # type: ignore[attr-defined]
    assert (splits["train"]["text"], splits["test"]["text"]) == (TEXTS[::2], TEXTS[1::2])


def test_several_tables_are_several_tasks_which_a_dict_names() -> None:
    near = pd.DataFrame(ROWS["STS"])
    sources = task_sources({"my reviews": pl.DataFrame(REVIEWS), "near": near})
    assert [source.name.rpartition("-")[0] for source in sources] == ["my_reviews", "near"]
    assert [source.name for source in task_sources([near, REVIEWS, near])] == [
        task_sources(data)[0].name for data in (near, REVIEWS)
    ]


def test_source_is_pickled_with_its_rows_and_equal_afterwards() -> None:
    (source,) = task_sources(pd.DataFrame(REVIEWS))
    copied = pickle.loads(pickle.dumps(source))
    assert (copied, hash(copied)) == (source, hash(source))
    assert copied.make().data.splits == source.make().data.splits  # type: ignore[attr-defined]


@pytest.mark.long
def test_column_names_are_chosen_and_their_case_is_ignored(tmp_path: Path) -> None:
    rows = [
        {"Sentence": text, "category": label, "text": "unused", "n": 1}
        for text, label in zip(TEXTS, LABELS, strict=True)
    ]
    files = [write(tmp_path / f"data{suffix}", rows) for suffix in (".csv", ".jsonl", ".parquet")]
    names = {
        task_sources(data, Columns("Sentence", "category"))[0].name
        for data in (pd.DataFrame(rows), pl.DataFrame(rows), *files)
    }
    names.add(task_sources(pd.DataFrame({"Text": TEXTS, " LABEL ": LABELS}))[0].name)
    assert names == {task_sources(REVIEWS)[0].name}
    with pytest.raises(
        TaskFileError, match=r"`text_column` must be a column of data, which has .*Did you mean 'Sentence'"
    ):
        task_sources(rows, Columns("Sentense"))
    with pytest.raises(OptionError, match="`text_column`, `label_column` and `drop_empty` apply only to tables"):
        task_sources("builtin", Columns(label_column="category"))


@pytest.mark.parametrize("task_type", ["Classification", "Clustering", "PairClassification"])
def test_whole_floats_are_labels(task_type: str) -> None:
    rows = pd.DataFrame(ROWS[task_type])
    column = "label" if "label" in rows else "labels"
    rows[column] = rows[column].astype("category").cat.codes.astype(int)
    floats = rows.astype({column: float})  # as pandas reads them next to a missing label
    assert task_sources(floats)[0].name == task_sources(rows)[0].name


def test_texts_without_labels_name_their_use() -> None:
    (source,) = task_sources(pd.DataFrame({"text": SENTENCES}))
    assert isinstance(source, TextsSource)
    assert source_texts(source) == SENTENCES
    with pytest.raises(TaskFileError, match=r"data-\w{8} holds texts without labels.*`select_layer\(model, texts\)`"):
        source.make()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pd.DataFrame({"text": ["a", None], "label": [1, 2]}), "^data, row 2: `text` must be a string that is not empty, but got None"),
        (pl.DataFrame({"text": ["a", "b"], "label": [1.5, 2.5]}), "^data, rows 1, 2: `label` must be a label"),
        (pd.DataFrame([["a", "x"]] * 9), r"has 0, 1\. .* Name yours with text_column="),
        (pd.DataFrame({"text": []}), "^data must have rows, but is empty"),
        ({"text": ["a"], "label": [1, 2]}, "^data must have columns of the same length, but has 1 of text, 2 of label"),
        ({"train": REVIEWS, "dev": REVIEWS}, r"data must hold a test split, or one table alone, but holds train, dev\. Rename a split to test"),
        ({"train": REVIEWS, "test": [("a", 5), ("b", 5)]}, r"^data\['test'\] must have at least two different labels"),
        (pl.LazyFrame({"text": ["a"]}), "must be names, paths, data or mteb's task objects, but got <LazyFrame"),
        (pd.DataFrame([["a", 1, 2]] * 9, columns=["text", "label", "label"]), "^data cannot be read: .* column names.*Rename"),
        ([5], "must be names, paths, data or mteb's task objects, but got 5"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::polars.exceptions.PerformanceWarning")
def test_invalid_data_is_refused(data: Any, message: str) -> None:
    with pytest.raises((TaskFileError, OptionError), match=message):
        task_sources(data)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(["text"]), r"`text_column` must be the name of a column, but got \['text'\]"),  # type: ignore[arg-type]
        (Columns("text", "text"), "`text_column` and `label_column` must differ, but both are 'text'"),
    ],
)
def test_invalid_column_names_are_refused(columns: Columns, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        task_sources(REVIEWS, columns)
