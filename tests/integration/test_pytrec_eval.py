"""The NumPy stand-in for pytrec_eval against the definitions, and against the real package where it is installed."""

import importlib.util
import math
import random
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import mteb
import pytest
from mteb.abstasks import AbsTask
from mteb.mocks.mock_tasks import MockRerankingTask, MockRetrievalTask

from midlayer_encoders.tasks import TfidfEncoder
from midlayer_encoders.tasks.tfidf import task_texts
from tests.support.others_warnings import MTEB

pytestmark = MTEB

Judgments = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]

FOLDER = Path(__file__).parents[2] / "pytrec_eval_numpy"
CUTOFFS = (1, 3, 5, 10, 1000)
MEASURES = {f"{name}.{','.join(map(str, CUTOFFS))}" for name in ("map_cut", "ndcg_cut", "recall", "P", "success")}
REAL = importlib.util.find_spec("pytrec_eval_ext") is not None


def _load_stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pytrec_eval_stand_in", FOLDER / "pytrec_eval" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = _load_stand_in()


def random_case(seed: int) -> tuple[Judgments, Run]:
    """Return judgments and a run with ties, grades, empty runs, unjudged documents and queries without relevant ones."""
    rng = random.Random(seed)
    documents = [f"{rng.choice('dZé日😀')}{rng.randrange(100)}" for _ in range(rng.randrange(31))]
    judgments: Judgments = {}
    run: Run = {}
    for query in range(rng.randint(1, 4)):
        judged_share = rng.choice((0, 0.3, 1))
        grades = rng.choice(((0,), (0, 1), (-1, 0, 1, 2, 3, 7)))
        pool = [*documents, *(f"missing{number}" for number in range(5))]
        judgments[f"q{query}"] = {name: rng.choice(grades) for name in pool if rng.random() < judged_share}
        scores = (0.1, 0.1 + 1e-9, 0.5, -3.0, 0.0, -0.0, rng.random(), rng.random())
        run[f"q{query}"] = {name: rng.choice(scores) for name in documents if rng.random() < 0.8}
    if seed % 5 == 0:
        run["unjudged query"] = {"d1": 1.0}
    if seed % 7 == 0:
        del run["q0"]
    return judgments, run


def expected_scores(judgments: Mapping[str, int], documents: Mapping[str, float]) -> dict[str, float]:
    """Return the five measures at every cutoff, written out from their definitions."""

    def single(score: float) -> float:
        return float(struct.unpack("f", struct.pack("f", score))[0])

    ranking = sorted(documents, key=lambda name: (single(documents[name]), name.encode()), reverse=True)
    grades = [judgments.get(name, 0) for name in ranking]
    num_relevant = sum(grade > 0 for grade in judgments.values())
    ideal = sorted((max(grade, 0) for grade in judgments.values()), reverse=True)
    scores = {}
    for cutoff in CUTOFFS:
        top = grades[:cutoff]
        hits = sum(grade > 0 for grade in top)
        precisions = [
            sum(grade > 0 for grade in top[: rank + 1]) / (rank + 1) for rank, grade in enumerate(top) if grade > 0
        ]
        gain = sum(max(grade, 0) / math.log2(rank + 2) for rank, grade in enumerate(top))
        ideal_gain = sum(grade / math.log2(rank + 2) for rank, grade in enumerate(ideal[:cutoff]))
        scores[f"P_{cutoff}"] = hits / cutoff
        scores[f"recall_{cutoff}"] = hits / num_relevant if num_relevant else 0.0
        scores[f"success_{cutoff}"] = float(hits > 0)
        scores[f"map_cut_{cutoff}"] = sum(precisions) / num_relevant if num_relevant else 0.0
        scores[f"ndcg_cut_{cutoff}"] = gain / ideal_gain if ideal_gain else 0.0
    return scores


def assert_equal(actual: Mapping[str, Mapping[str, float]], expected: Mapping[str, Mapping[str, float]]) -> None:
    assert actual.keys() == expected.keys()
    for query, scores in expected.items():
        assert actual[query] == pytest.approx(scores, rel=0, abs=1e-12), query


def test_random_runs_match_the_definitions() -> None:
    for seed in range(200):
        judgments, run = random_case(seed)
        expected = {
            query: expected_scores(judgments[query], documents)
            for query, documents in run.items()
            if judgments.get(query)
        }
        assert_equal(stand_in.RelevanceEvaluator(judgments, MEASURES).evaluate(run), expected)


@pytest.mark.long
@pytest.mark.skipif(not REAL, reason="the real pytrec-eval-terrier is not installed")
def test_random_runs_match_the_real_package() -> None:
    import pytrec_eval

    num_scores = 0
    for seed in range(1000):
        judgments, run = random_case(seed)
        expected = pytrec_eval.RelevanceEvaluator(judgments, MEASURES).evaluate(run)
        assert_equal(stand_in.RelevanceEvaluator(judgments, MEASURES).evaluate(run), expected)
        num_scores += sum(map(len, expected.values()))
    assert num_scores > 20_000


@pytest.mark.skipif(not REAL, reason="the real pytrec-eval-terrier is not installed")
@pytest.mark.parametrize("task_class", [MockRetrievalTask, MockRerankingTask])
def test_mteb_scores_are_the_same_with_both(task_class: type[AbsTask], monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_class()
    task.load_data()
    encoder = TfidfEncoder(task_texts(task))

    def scores() -> str:
        result = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False)[0]
        return repr([sorted(row.items()) for rows in result.scores.values() for row in rows])  # as text: NaN equals NaN

    expected = scores()
    monkeypatch.setattr(sys.modules["mteb._evaluators.retrieval_metrics"], "pytrec_eval", stand_in)
    assert scores() == expected


@pytest.mark.parametrize("measure", ["map", "ndcg_cut", "P.0", "P.1.5", "recip_rank", "ndcg_cut.ten"])
def test_another_measure_is_refused_with_the_cure(measure: str) -> None:
    with pytest.raises(ValueError, match=r"unsupported measure .* pip install --upgrade pytrec-eval-terrier"):
        stand_in.RelevanceEvaluator({"q": {"a": 1}}, {measure})
