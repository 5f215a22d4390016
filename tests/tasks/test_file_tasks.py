import logging
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders.tasks import TaskFileError, resolve_tasks, tfidf_scores
from midlayer_encoders.tasks.own_data import own_data
from midlayer_encoders.tasks.sources import task_sources
from tests.tasks.rows import ROWS, Rows, write

SUFFIXES = (".jsonl", ".csv", ".parquet")


@pytest.mark.parametrize("task_type", ROWS)
def test_every_format_gives_the_same_rows(tmp_path: Path, task_type: str) -> None:
    data = [own_data(write(tmp_path / suffix / f"mine{suffix}", ROWS[task_type])) for suffix in SUFFIXES]
    assert {task_data.type for task_data in data} == {task_type}
    assert data[0].splits == data[1].splits == data[2].splits
    assert len({task_data.name for task_data in data}) == 1


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("text", "label"), "Classification"),
        (("text", "label", "labels"), "Classification"),
        (("text", "labels"), "Clustering"),
        (("sentences", "label"), "Clustering"),
        (("sentence1", "sentence2", "label"), "PairClassification"),
        (("sentence1", "sentence2", "labels", "score"), "STS"),
        (("query", "positive"), "Retrieval"),
        (("positive", "anchor", "source"), "Retrieval"),
        (("text",), "Unlabeled"),
    ],
)
def test_type_is_the_first_whose_columns_exist(tmp_path: Path, columns: tuple[str, ...], expected: str) -> None:
    def value(column: str, number: int) -> Any:
        return number % 2 if column.startswith(("label", "score")) else f"{column} {number}"

    rows = [{column: value(column, number) for column in columns} for number in range(8)]
    assert own_data(write(tmp_path / "mine.jsonl", rows)).type == expected


def test_train_and_test_files_are_the_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", ROWS["Classification"][::2])
    write(tmp_path / "test.jsonl", ROWS["Classification"][1::2])
    write(tmp_path / "validation.jsonl", [{"anything": 1}])
    data = own_data(tmp_path)
    assert data.splits["train"]["text"] == [row["text"] for row in ROWS["Classification"][::2]]
    assert data.splits["test"]["text"] == [row["text"] for row in ROWS["Classification"][1::2]]
    assert data.note == ""


def test_single_file_is_split_by_label_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "mine.csv", ROWS["Classification"])
    with caplog.at_level(logging.WARNING):
        task_sources(path)
    assert caplog.text.count("split in halves, stratified by label, with seed 42") == 1
    splits = own_data(path).splits
    assert not set(splits["train"]["text"]) & set(splits["test"]["text"])
    assert [splits[split]["label"].count(label) for split in splits for label in range(4)] == [6] * 8
    assert own_data(path).splits == splits


def test_texts_of_digits_stay_texts_in_csv(tmp_path: Path) -> None:
    rows = [{"text": str(number), "label": number % 2} for number in range(8)]
    data = own_data(write(tmp_path / "mine.csv", rows))
    assert sorted([*data.splits["train"]["text"], *data.splits["test"]["text"]]) == [str(n) for n in range(8)]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separator_is_read_from_the_first_line(tmp_path: Path, separator: str, suffix: str) -> None:
    path = tmp_path / f"mine{suffix}"
    cells = [
        ["text", "label"],
        *([f'"{text}, a|b; c"', label] for text, label in map(dict.values, ROWS["Classification"])),
    ]
    path.write_text("\r\n".join(separator.join(row) for row in cells))
    splits = own_data(path).splits
    expected = {f"{row['text']}, a|b; c" for row in ROWS["Classification"]}
    assert {*splits["train"]["text"], *splits["test"]["text"]} == expected


def test_case_of_column_names_is_ignored(tmp_path: Path) -> None:
    rows = [{"Text": row["text"], "LABEL": row["label"]} for row in ROWS["Classification"]]
    expected = own_data(write(tmp_path / "mine.csv", ROWS["Classification"])).name
    for suffix in SUFFIXES:
        assert own_data(write(tmp_path / suffix / f"mine{suffix}", rows)).name == expected
    both = [{"text": row["text"], "label": row["label"], "Label": "other"} for row in ROWS["Classification"]]
    assert own_data(write(tmp_path / "mine.jsonl", both)).name == expected


def test_lines_of_a_text_file_are_texts_without_labels(tmp_path: Path) -> None:
    texts = [row["text"] for row in ROWS["Classification"]]
    (tmp_path / "mine.txt").write_text("\n\n".join(texts))
    data = own_data(tmp_path / "mine.txt")
    assert (data.type, data.splits["test"]["text"]) == ("Unlabeled", texts)
    assert data.name == own_data(write(tmp_path / "mine.jsonl", [{"text": text} for text in texts])).name


def change_row(task_type: str, number: int, **values: Any) -> Rows:
    rows = [dict(row) for row in ROWS[task_type]]
    rows[number] |= values
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "must have rows, but is empty"),
        (
            [{"id": n, "sentence": f"sentence {n}", "my category": n % 2} for n in range(9)],
            r"has id, sentence, my category\. A task has .*\. Name yours with text_column=… and label_column=…",
        ),
        (
            [{"question1": f"a {n}", "question2": f"b {n}", "is_duplicate": n % 2} for n in range(9)],
            "A task has text and label; sentence1, sentence2 and score or label; or query and positive",
        ),
        (change_row("STS", 2, sentence1=" "), "line 3: `sentence1` must be a string that is not empty, but got ' '"),
        (change_row("STS", 0, sentence2=5), "line 1: `sentence2` must be a string that is not empty, but got 5"),
        (change_row("STS", 4, score="high"), "line 5: `score` must be a finite number, but got 'high'"),
        (change_row("STS", 4, score=float("nan")), "line 5: `score` must be a finite number, but got nan"),
        (change_row("STS", 4, score=10**400), "line 5: `score` must be a finite number, but got 1000"),
        (change_row("STS", 4, score=True), "line 5: `score` must be a finite number, but got True"),
        ([{**row, "score": 1} for row in ROWS["STS"]], "two different scores, but all 48 rows have 1"),
        (change_row("PairClassification", 1, labels=2), "line 2: `labels` must be 0 or 1, but got 2"),
        ([{**row, "labels": 1} for row in ROWS["PairClassification"]], "two different labels"),
        (change_row("Classification", 1, label=None), "line 2: `label` must be a label, a string or a whole number"),
        (change_row("Classification", 1, label=0.5), "line 2: `label` must be a label, .* but got 0.5"),
        (change_row("Classification", 1, label=7), "labels of one kind, but some are strings and some are numbers"),
        ([{**row, "label": "x"} for row in ROWS["Classification"]], "two different labels, but all 48 rows have 'x'"),
        (change_row("Classification", 1, label="rare"), "every label twice or more, .* but has one row of 'rare'"),
        (change_row("Reranking", 0, positive=[]), "line 1: `positive` must be a list of strings, none of them empty"),
        (change_row("Reranking", 0, negative="no list"), "line 1: `negative` must be a list of strings"),
        (change_row("Reranking", 3, positive=["x"], negative=["y", "x"]), "line 4: a passage must not be both .*: 'x'"),
        ([{}, {}, *ROWS["STS"]], "lines 1, 2: `sentence1` must be a string .* but got None. Correct or remove them"),
        ([{}] * 9 + ROWS["STS"], "lines 1, 2, 3, 4, 5 and 4 more"),
    ],
)
def test_invalid_rows_are_refused(tmp_path: Path, rows: Rows, message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        own_data(write(tmp_path / "mine.jsonl", rows))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.jsonl", b'{"text": "a", "label": 1}\n\n{"text": "b", \n', "line 3: must be one JSON object, .* be read"),
        ("mine.jsonl", b'{"text": "\xff\xfe", "label": 1}\n', "line 1: must be UTF-8, but the byte 0xff is not"),
        ("mine.jsonl", b"[1, 2]\n", r"line 1: must be one JSON object, but got '\[1, 2\]'"),
        ("mine.csv", b"", "must have rows, but is empty"),
        ("mine.csv", b"text,label\n", "must have rows, but is empty"),
        ("mine.csv", b"text,label\na,1\nb,2,3,4\n", "line 3: must have 2 cells, .* but has 4. Put a cell that holds"),
        ("mine.csv", b"text,label\na,1\n,0\n", "line 3: `text` must be a string that is not empty, but got None"),
        ("mine.csv", b"query,positive,negative\na,b,c\n", r"line 2: `positive` must be a list .* \(in CSV: as JSON\)"),
        ("mine.csv", b"sentence1,sentence2,score\na,b,1\nc,d,two\n", "line 3: `score` .* but got 'two'"),
        ("mine.parquet", b"PAR1", "cannot be read as parquet"),
        (
            "mine.json",
            b"[]",
            "must be one of .jsonl, .ndjson, .csv, .tsv, .parquet, .txt, but its name ends in '.json'. Convert it",
        ),
        (
            "mine.csv",
            b"a long text;sport\nanother text;politics\nthird text;sport\n",
            r"must have the columns of a task, but has a long text, sport\. .*The first line of a CSV file must be names",
        ),
        ("mine.csv", b"text;label\na, b;1\nc;2;3\n", "line 3: must have 2 cells, .* Put a cell that holds a semicolon"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskFileError, match=message):
        own_data(tmp_path / name)


def test_folders_without_a_clear_test_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"must hold a test split, .* but holds no file of \.jsonl"):
        own_data(tmp_path)
    write(tmp_path / "a.jsonl", ROWS["STS"])
    assert own_data(tmp_path).type == "STS"
    write(tmp_path / "b.jsonl", ROWS["STS"])
    with pytest.raises(TaskFileError, match=r"but holds a\.jsonl, b\.jsonl\. Pass the path of a file, or of several"):
        own_data(tmp_path)
    write(tmp_path / "a.csv", ROWS["STS"])
    with pytest.raises(TaskFileError, match=r"one file of each name, but has a\.csv and a\.jsonl"):
        own_data(tmp_path)


def test_labels_only_in_the_test_rows_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS["Classification"][:24])
    write(tmp_path / "test.jsonl", ROWS["Classification"])
    with pytest.raises(TaskFileError, match="these are only in test: 'market', 'poem'"):
        own_data(tmp_path)


def test_changed_rows_give_another_task(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS["STS"])
    (source,) = task_sources(path)
    before = source.make().metadata
    write(path, change_row("STS", 0, score=5.0))
    assert source.make().metadata.name == before.name  # a source has the rows that were read
    after = resolve_tasks(path)[0].metadata
    assert before.name != after.name
    assert before.dataset["revision"] != after.dataset["revision"]
    assert before.dataset["revision"].endswith(before.name.rpartition("-")[2])


def test_mteb_cache_never_returns_scores_of_other_rows(tmp_path: Path) -> None:
    import mteb
    from mteb.cache import ResultCache

    from midlayer_encoders.tasks import TfidfEncoder
    from midlayer_encoders.tasks.tfidf import task_texts

    cache = ResultCache(tmp_path / "cache")
    scores = []
    for rows in (ROWS["STS"], [{**row, "score": -row["score"]} for row in ROWS["STS"]]):
        (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", rows))
        result = mteb.evaluate(TfidfEncoder(task_texts(task)), task, cache=cache, show_progress_bar=False)
        scores.append(result[0].get_score())
    assert scores[0] == pytest.approx(-scores[1])


@pytest.mark.parametrize(
    ("name", "task_type", "expected"),
    [
        ("STSBenchmark", "STS", 0.688),
        ("TrecQAReranking", "Reranking", 0.666),
        pytest.param("TwitterURLCorpus", "PairClassification", 0.730, marks=pytest.mark.slow),
        pytest.param("StackOverflowTitlesClustering", "Clustering", 0.451, marks=pytest.mark.slow),
        pytest.param("Banking77Classification", "Classification", 0.638, marks=pytest.mark.slow),
        pytest.param("EmotionClassification", "Classification", 0.249, marks=pytest.mark.slow),
    ],
)
def test_real_data_evaluates(shared_data: Path, name: str, task_type: str, expected: float) -> None:
    (task,) = resolve_tasks(shared_data / "tasks" / name)
    assert task.metadata.type == task_type
    assert tfidf_scores(task) == pytest.approx(expected, abs=0.02)


def test_scores_follow_the_words_that_texts_share(tmp_path: Path) -> None:
    """TF-IDF ranks pairs by their shared words, in data of thousands of rows."""
    words = [f"word{number}" for number in range(40)]
    rows = [
        {
            "sentence1": " ".join(words[start : start + 8]),
            "sentence2": " ".join(words[start + 8 - shared : start + 16 - shared]),
            "score": shared,
        }
        for start in range(20)
        for shared in range(9)
    ]
    (task,) = resolve_tasks(write(tmp_path / "pairs.jsonl", rows))
    assert task.metadata.type == "STS"
    assert tfidf_scores(task) > 0.95
    texts = [{"text": f"{words[number % 40]} {number}", "label": words[number % 7]} for number in range(7000)]
    (large,) = resolve_tasks(write(tmp_path / "large.jsonl", texts))
    large.load_data()
    assert large.dataset is not None
    assert len(large.dataset["test"]) > 3000


@pytest.mark.parametrize("name", ["Banking77Classification", "StackOverflowTitlesClustering", "TwitterURLCorpus"])
def test_large_real_data_loads(shared_data: Path, name: str) -> None:
    (task,) = resolve_tasks(shared_data / "tasks" / name)
    task.load_data()
    assert task.dataset is not None
    assert len(task.dataset["test"]) > 3000
