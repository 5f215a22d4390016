"""The overview of a task's data before a sweep: rows, duplicates, leaks and the balance of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders.tasks import TaskOverview, TextsSource, task_overview, task_sources
from tests.others_warnings import MTEB
from tests.scoring.made import pairs
from tests.tasks.rows import ROWS, SENTENCES, write
from tests.tasks.test_beir import CORPUS, QUERIES, write_beir

pytestmark = MTEB


def make_overview(path: Any) -> TaskOverview:
    (source,) = task_sources(path)
    return task_overview(source, None if isinstance(source, TextsSource) else source.make())


def test_classification_reports_duplicates_and_leaked_test_texts(tmp_path: Path) -> None:
    rows = ROWS["Classification"]
    write(tmp_path / "train.jsonl", [*rows[:30], rows[0], rows[1]])
    write(tmp_path / "test.jsonl", [*rows[20:30], *rows[28:30]])
    overview = make_overview(tmp_path)
    assert (overview.type, overview.why) == ("Classification", "columns text, label")
    assert overview.rows == {"test": 12, "train": 32}
    assert overview.duplicates == {"test": 2, "train": 2}
    assert overview.leaks == {"test texts that are also in train": 12}
    # river: 14 of 44 rows, engine: 12 + 4, poem: 6 + 8
    assert overview.balance == {
        "labels": 3, "rarest, share of rows": pytest.approx(14 / 44), "commonest, share of rows": pytest.approx(16 / 44)
    }  # fmt: skip


def test_retrieval_reports_queries_that_are_documents(tmp_path: Path) -> None:
    corpus = [*CORPUS, {**CORPUS[1], "_id": "again"}]
    queries = [{**QUERIES[0], "text": CORPUS[0]["text"]}, *QUERIES[1:12], {**QUERIES[1], "_id": "same"}]
    qrels = [*((f"q{n}", f"d{n}", 1) for n in range(12)), ("same", "d1", 1), ("same", "again", 3), ("same", "d2", 0)]
    overview = make_overview(write_beir(tmp_path / "mine", corpus, queries, qrels))
    assert (overview.type, overview.why) == ("Retrieval", "corpus, queries and qrels")
    assert overview.rows == {"queries": 13, "documents": 49, "relevant pairs": 14}
    assert overview.duplicates == {"queries": 1, "documents": 1}
    assert overview.leaks == {"queries that are also documents": 1}
    assert list(overview.balance.values()) == [1, 2, pytest.approx(14 / 13)]


def test_query_that_cannot_match_itself_is_not_a_leak(tmp_path: Path) -> None:
    corpus = [*CORPUS, {**CORPUS[1], "_id": "again"}]
    queries = [{"_id": row["_id"], "text": row["text"]} for row in CORPUS[:12]]
    overview = make_overview(
        write_beir(tmp_path / "mine", corpus, queries, [(f"d{n}", f"d{n + 12}", 1) for n in range(12)])
    )
    assert "does not count as found" in overview.note
    assert overview.leaks == {"queries that are also documents": 1}  # of d1, under another id


def test_relevant_pairs_of_several_subsets_are_counted_once(tmp_path: Path) -> None:
    (source,) = task_sources(write_beir(tmp_path / "mine"))
    task = source.make()
    task.load_data()
    task.dataset = dict.fromkeys(("one", "two", "three"), task.dataset["default"])
    assert task_overview(source, task).rows == {"queries": 36, "documents": 144, "relevant pairs": 72}


@pytest.mark.parametrize(
    ("task_type", "rows", "leaks", "balance"),
    [
        ("STS", {"test": 48}, {}, {"lowest score": 0, "highest score": 5}),
        ("BitextMining", {"test": 48}, {}, {}),
        ("MultilabelClassification", {"train": 24, "test": 24}, {}, None),
        ("Reranking", {"queries": 20, "documents": 48, "relevant pairs": 20}, {"queries that are also documents": 20}, None),
    ],
)  # fmt: skip
def test_overview_of_other_types(tmp_path: Path, task_type: str, rows: Any, leaks: Any, balance: Any) -> None:
    overview = make_overview(write(tmp_path / "mine.jsonl", ROWS[task_type]))
    assert (overview.type, dict(overview.rows), dict(overview.leaks)) == (task_type, rows, leaks)
    if balance is not None:
        assert overview.balance == balance


def test_pairs_of_identical_texts_and_texts_without_labels(tmp_path: Path) -> None:
    rows = [*ROWS["BitextMining"], {"sentence1": "one", "sentence2": "one"}]
    assert make_overview(write(tmp_path / "mine.jsonl", rows)).leaks == {"pairs of a text with itself": 1}
    texts = make_overview(write(tmp_path / "texts.csv", [{"text": text} for text in (*SENTENCES, SENTENCES[0])]))
    assert (texts.type, texts.rows, texts.duplicates) == ("Unlabeled", {"texts": 49}, {"texts": 1})
    assert texts.why == "column text alone"


def test_mteb_task_with_subsets_lists_them_separately() -> None:
    overview = make_overview(pairs())
    assert overview.rows == {"en/test": 30, "de/test": 30}
    assert overview.duplicates == {"en/test": 6, "de/test": 6}
    assert overview.leaks == {"pairs of a text with itself": 2}
    assert overview.why == "a task of mteb"
