"""Rows read from files of pairs, and the errors for invalid files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks.tables import TaskFileError
from midlayer_encoders.tasks.training_rows import read_pairs

TWO = [{"anchor": "a", "positive": "b"}, {"anchor": "c, with a comma", "positive": "d"}]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    frame = pl.DataFrame(rows)
    if path.suffix == ".parquet":
        frame.write_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        frame.write_csv(path, separator="\t" if path.suffix == ".tsv" else ",")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "parquet"])
def test_every_format_holds_the_same_rows(suffix: str, tmp_path: Path) -> None:
    actual = read_pairs(written(tmp_path / f"mine.{suffix}", TWO))
    assert (actual.kind, list(actual.rows), actual.name) == ("pairs", TWO, f"mine.{suffix}")
    assert actual.digest == read_pairs(TWO).digest


@pytest.mark.parametrize(
    ("rows", "kind", "first"),
    [
        ([{"query": "a", "positive": "b"}, {"query": "c", "positive": "d"}], "pairs", {"anchor": "a", "positive": "b"}),
        ([{"sentence1": "a", "sentence2": "b"}, {"sentence1": "c", "sentence2": "d"}], "pairs", {"anchor": "a", "positive": "b"}),
        (
            [{"anchor": n, "positive": "b", "negative": "x", "negative_2": "y", "negative_score": 1.0} for n in "ab"],
            "pairs", {"anchor": "a", "positive": "b", "negative": "x", "negative_2": "y"},
        ),
        (
            [{"anchor": n, "positive": "b", "negatives": "x"} for n in "ab"],
            "pairs", {"anchor": "a", "positive": "b", "negatives": "x"},
        ),
        (
            [{"sentence1": "a", "sentence2": "b", "score": n} for n in (3, 4.5)],
            "scored", {"sentence1": "a", "sentence2": "b", "score": 3.0},
        ),
        (
            [{"sentence1": "a", "sentence2": "b", "labels": n} for n in (1, 0)],
            "scored", {"sentence1": "a", "sentence2": "b", "score": 1.0},
        ),
        ([{"text": "a", "label": n} for n in ("x", "y")], "labels", {"text": "a", "label": "x"}),
        ([{"sentences": "a", "labels": n} for n in (1, 2)], "labels", {"text": "a", "label": 1}),
    ],
)  # fmt: skip
def test_kind_of_rows_is_detected_by_columns(rows: list[dict[str, Any]], kind: str, first: dict[str, Any]) -> None:
    actual = read_pairs(rows)
    assert (actual.kind, actual.rows[0]) == (kind, first)


def test_a_query_with_several_passages_is_a_row_for_each() -> None:
    rows = [{"query": "q", "positive": ["a", "b", "c"], "negative": ["x", "y"]}]
    assert [tuple(row.values()) for row in read_pairs(rows).rows] == [
        ("q", "a", "x"), ("q", "b", "y"), ("q", "c", "x"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.csv",
            "left,right\na,b\n",
            "must have the columns of pairs, but has left, right. Pairs: anchor and positive",
        ),
        ("a.csv", "anchor,positive\n", "a.csv must have rows, but is empty"),
        ("a.jsonl", "", "a.jsonl must have rows, but is empty"),
        ("a.csv", "anchor,positive\na,b\n", "must have two rows or more that differ, but has 1"),
        ("a.csv", "anchor,positive\n" + "a,b\n" * 3, "must have two rows or more that differ, but has 1"),
        ("a.csv", "anchor,positive\na,a\nb,b\n", "in all 2 rows both are the same text"),
        (
            "a.csv",
            "anchor,positive\na,b\nc,\nd,\n",
            "lines 3, 4: `positive` must be a string that is not empty, or a list",
        ),
        ("a.csv", "sentence1,sentence2,score\na,b,x\n", "line 2: `score` must be a finite number, but got 'x'"),
        ("a.csv", "sentence1,sentence2,score\na,b,1\nc,d,1\n", "two different scores, but all 2"),
        ("a.csv", "sentence1,sentence2,label\na,b,2\n", "`label` must be 0 or 1, but got 2"),
        ("a.csv", "text,label\na,x\nb,x\n", "two different labels, but all 2 rows have 'x'"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n', "labels of one kind"),
        ("a.tsv", "anchor\tpositive\na\tb\tc\n", "must have 2 cells.* Put a cell that holds a tab in quotes"),
        ("a.json", "a", "must be one of .jsonl"),
    ],
)
def test_invalid_training_rows_are_refused(name: str, content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TaskFileError, match=words):
        read_pairs(path)


def test_a_number_in_a_csv_is_a_text_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("anchor,positive\none,1\ntwo,2\n")
    assert [row["positive"] for row in read_pairs(tmp_path / "a.csv").rows] == ["1", "2"]


def test_seeded_share_is_held_out() -> None:
    pairs = read_pairs([{"anchor": str(n), "positive": f"{n}!"} for n in range(40)])
    saved, held_out = pairs.split(0.1, seed=1)
    assert held_out is not None
    assert (len(saved.rows), len(held_out.rows)) == (36, 4)
    assert sorted(saved.texts + held_out.texts) == sorted(pairs.texts)
    assert pairs.split(0.1, seed=1)[1] == held_out
    assert pairs.split(0.1, seed=2)[1] != held_out
    assert pairs.split(0, seed=1)[1] is None
    with pytest.raises(
        OptionError, match=r"2 pairs or more .* as many to hold out, but `pairs` has 2 rows for held_out=0.5"
    ):
        read_pairs(TWO).split(0.5, 0)
    separate = [{"text": label, "label": label} for label in "abcd"]
    with pytest.raises(OptionError, match="has 4 rows and too few of each label for held_out=0"):
        read_pairs(separate).split(0, 0)


def test_texts_of_a_label_are_paired_each_an_anchor_once() -> None:
    texts = [
        {"text": f"{label}{n}", "label": label} for label, count in (("a", 5), ("b", 2), ("c", 1)) for n in range(count)
    ]
    result = read_pairs(texts).loss_rows(seed=0)
    assert Counter(row["anchor"] for row in result) == Counter(row["positive"] for row in result)
    assert Counter(row["anchor"][0] for row in result) == {"a": 5, "b": 2}  # of one text there is no pair
    assert all(
        row["anchor"][0] == row["positive"][0] != row["anchor"] for row in result if row["anchor"] != row["positive"]
    )
    assert all(row["anchor"] != row["positive"] for row in result)
    assert {(row["anchor"][0], row["label"]) for row in result} == {("a", 0), ("b", 1)}
    assert result != read_pairs(texts).loss_rows(seed=1)


def test_list_of_anchors_is_refused() -> None:
    rows = [{"query": [f"one {n}", f"other {n}"], "positive": f"text {n}"} for n in range(4)]
    with pytest.raises(
        TaskFileError, match=r"`query` must be a string that is not empty, but got \['one 0', 'other 0'\]"
    ):
        read_pairs(rows)
