"""Passages that an encoder cannot tell apart: the score is one number, and it does not know which passage is right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders.tasks import TfidfEncoder, resolve_tasks
from midlayer_encoders.tasks.tfidf import task_texts
from tests.support.others_warnings import MTEB
from tests.tasks.rows import write

pytestmark = MTEB


class Same(TfidfEncoder):
    """An encoder that gives every text the same vector."""

    def encode(self, inputs: Any, **_: Any) -> Any:
        return np.ones((sum(len(batch["text"]) for batch in inputs), 3), dtype="float32")


def score(path: Path, rows: list[dict[str, Any]]) -> float:
    import mteb

    (task,) = resolve_tasks(write(path, rows))
    return float(mteb.evaluate(Same(task_texts(task)), task, cache=None, show_progress_bar=False)[0].get_score())


@pytest.mark.parametrize("others", [slice(None), slice(None, None, -1)])
def test_equal_similarities_are_ranked_by_the_texts_last_in_the_alphabet_first(others: slice, tmp_path: Path) -> None:
    passages = ["an apple", "a boat", "the cloud", "some dust"]
    ranks = {text: rank for rank, text in enumerate(sorted(passages, reverse=True), start=1)}  # trec_eval's rule
    rows = [
        {"query": f"query {n}", "positive": [text], "negative": [other for other in passages if other != text][others]}
        for n, text in enumerate(passages)
    ]
    for n, (row, text) in enumerate(zip(rows, passages, strict=True)):
        assert score(tmp_path / f"{n}.jsonl", [row]) == pytest.approx(1 / ranks[text], abs=1e-4)
    assert score(tmp_path / "all.jsonl", rows) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4, abs=1e-4)


def test_a_passage_of_several_queries_counts_only_among_each_query_s_own_candidates(tmp_path: Path) -> None:
    rows = [
        {"query": "one", "positive": ["d", "a"], "negative": ["c"]},  # d, c, a: precision 1 and 2 / 3
        {
            "query": "two",
            "positive": ["c", "c"],
            "negative": ["e", "a"],
        },  # e, c, a: precision 1 / 2, named twice or not
        {"query": "three", "positive": ["e"], "negative": ["b"]},
    ]
    assert score(tmp_path / "mine.jsonl", rows) == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2 + 1) / 3, abs=1e-4)
