import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score

from midlayer_encoders.tasks import TfidfEncoder, resolve_tasks
from midlayer_encoders.tasks.tfidf import task_texts
from tests.support.others_warnings import MTEB
from tests.tasks.rows import ROWS, write

pytestmark = MTEB


def make_task(tmp_path: Path, task_type: str) -> Any:
    (task,) = resolve_tasks(write(tmp_path / f"{task_type}.jsonl", ROWS[task_type]))
    return task


def evaluate(task: Any) -> Any:
    import mteb

    encoder = TfidfEncoder(task_texts(task))
    return mteb.evaluate(encoder, task, cache=None, show_progress_bar=False)[0]


def cosine(task: Any) -> Callable[[str, str], float]:
    """Return a function that computes the cosine of two texts' vectors."""
    texts = task_texts(task)
    vectors = dict(zip(texts, TfidfEncoder(texts).encode([{"text": texts}]), strict=True))
    return lambda a, b: float(vectors[a] @ vectors[b] / np.linalg.norm(vectors[a]) / np.linalg.norm(vectors[b]))


def test_sts_scores_the_rank_correlation_of_cosine_and_grade(tmp_path: Path) -> None:
    task = make_task(tmp_path, "STS")
    similarity = cosine(task)
    expected = spearmanr(
        [similarity(row["sentence1"], row["sentence2"]) for row in ROWS["STS"]], [row["score"] for row in ROWS["STS"]]
    ).statistic
    assert evaluate(task).get_score() == pytest.approx(expected, abs=1e-4)


def test_pairs_score_the_average_precision_of_the_cosine(tmp_path: Path) -> None:
    task = make_task(tmp_path, "PairClassification")
    similarity = cosine(task)
    rows = ROWS["PairClassification"]
    expected = average_precision_score(
        [row["labels"] for row in rows], [similarity(row["sentence1"], row["sentence2"]) for row in rows]
    )
    assert evaluate(task).scores["test"][0]["cosine_ap"] == pytest.approx(expected, abs=1e-4)


def test_reranking_scores_the_mean_reciprocal_rank_of_one_positive(tmp_path: Path) -> None:
    rows = [
        {"query": "a glacier", "positive": ["the glacier melts"], "negative": ["a market opens", "the violin sings"]},
        {"query": "a market", "positive": ["the violin sings"], "negative": ["a market opens", "the glacier melts"]},
    ]
    (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", rows))
    # The first query ranks its passage first. The second shares a word with a wrong passage and none with its own, which
    # ties with the other wrong one, so it is second or third.
    assert evaluate(task).get_score() in (pytest.approx((1 + 1 / 2) / 2), pytest.approx((1 + 1 / 3) / 2))


@pytest.mark.long
def test_classification_scores_a_logistic_regression_on_eight_rows_per_label(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    task = make_task(tmp_path, "Classification")
    task.load_data()
    train, test = (task.dataset[split].to_dict() for split in ("train", "test"))
    encoder = TfidfEncoder(task_texts(task))
    x_train, x_test = (encoder.encode([{"text": rows["text"]}]) for rows in (train, test))
    # mteb shuffles by the task's seed, again for each experiment, and keeps the first eight of each label (here all six).
    order = list(range(len(train["label"])))
    accuracies = []
    for _ in range(10):
        np.random.RandomState(task.seed).shuffle(order)
        model = LogisticRegression(max_iter=100, random_state=task.seed)
        model.fit(x_train[order], np.array(train["label"])[order])
        accuracies.append((model.predict(x_test) == np.array(test["label"])).mean())
    assert evaluate(task).get_score() == pytest.approx(np.mean(accuracies), abs=1e-6)


def test_clustering_embeds_every_row_and_separates_distinct_clusters(tmp_path: Path) -> None:
    rows = [
        {"sentences": f"{word} number{n}", "labels": word} for word in ("stone", "cloud", "flame") for n in range(9)
    ]
    (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", rows))
    encoded_texts = []

    class Oracle(TfidfEncoder):
        def encode(self, inputs: Any, **kwargs: Any) -> Any:
            texts = [text for batch in inputs for text in batch["text"]]
            encoded_texts.extend(texts)
            words = ["stone", "cloud", "flame"]
            return np.eye(3, dtype="float32")[[words.index(text.split()[0]) for text in texts]]

    import mteb

    result = mteb.evaluate(Oracle(task_texts(task)), task, cache=None, show_progress_bar=False)[0]
    assert result.get_score() == pytest.approx(1.0)
    assert sorted(encoded_texts) == sorted(row["sentences"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("task_type", ROWS)
def test_task_survives_unloading_and_pickling(tmp_path: Path, task_type: str) -> None:
    task = make_task(tmp_path, task_type)
    copy = pickle.loads(pickle.dumps(task))
    task.load_data()
    task.unload_data()
    assert task.metadata.name == copy.metadata.name
    assert evaluate(task).get_score() == evaluate(copy).get_score()
    assert copy.metadata.type == task_type
