from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.feature_extraction.text import TfidfVectorizer

from midlayer_encoders.tasks import TfidfEncoder, resolve_tasks, tfidf_scores
from midlayer_encoders.tasks.tfidf import task_texts
from tests.tasks.rows import ROWS, SENTENCES, write


def test_vectors_match_scikit_learn() -> None:
    encoder = TfidfEncoder(SENTENCES)
    vectors = encoder.encode([{"text": SENTENCES[:3]}, {"text": SENTENCES[3:]}])
    expected = TfidfVectorizer(sublinear_tf=True).fit_transform(SENTENCES).toarray()
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(encoder.similarity(vectors[:4], vectors), expected[:4] @ expected.T, atol=1e-5)
    np.testing.assert_allclose(encoder.similarity_pairwise(vectors, vectors), 1, atol=1e-5)


def test_score_matches_the_definition(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS["STS"])
    rows = ROWS["STS"]
    vectorizer = TfidfVectorizer(sublinear_tf=True).fit(list(dict.fromkeys(r["sentence1"] for r in rows)))
    left, right = (vectorizer.transform([row[side] for row in rows]).toarray() for side in ("sentence1", "sentence2"))
    expected = spearmanr((left * right).sum(1), [row["score"] for row in rows]).statistic
    assert tfidf_scores(resolve_tasks(path)[0]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("task_type", ROWS)
def test_texts_are_those_of_the_task_without_duplicates(tmp_path: Path, task_type: str) -> None:
    (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", ROWS[task_type]))
    expected = set()
    for row in ROWS[task_type]:
        for column in ("text", "sentences", "sentence1", "sentence2", "query"):
            expected |= {row[column]} if column in row else set()
        expected |= {*row.get("positive", []), *row.get("negative", [])}
    texts = task_texts(task)
    assert set(texts) == expected
    assert len(texts) == len(expected)
