"""Scores of all layers together match mteb's scores of single layers, on unusual data."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import pytrec_eval
import torch
from mteb.abstasks import AbsTask

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.label_accuracy import all_alike
from midlayer_encoders.sweeping.scoring import all_layers
from midlayer_encoders.sweeping.scoring import retrieval as retrieval_scores
from midlayer_encoders.sweeping.scoring.all_layers import resampled_scores
from midlayer_encoders.sweeping.scoring.classification import ClassifierData, Classifiers
from midlayer_encoders.sweeping.scoring.clustering import Clusterings, Draws
from midlayer_encoders.sweeping.scoring.recording import scores_together
from midlayer_encoders.sweeping.scoring.retrieval import ranking_score
from tests.scoring.made import by_mteb, classification, clustering, pairs, retrieval, sts, together
from tests.support.others_warnings import MTEB
from tests.support.thinned import thinned

pytestmark = [*MTEB, pytest.mark.filterwarnings("ignore:.*(ill-defined|distinct clusters|copy construct)")]


@pytest.mark.parametrize(
    "make",
    [
        sts,
        lambda: sts(main_score="pearson"),
        lambda: sts(main_score="manhattan_spearman"),
        pairs,
        lambda: pairs("dot_ap"),
        retrieval,
        lambda: retrieval("map_at_5"),
        *thinned(
            (partial(retrieval, name) for name in ("mrr_at_3", "recall_at_10", "precision_at_5", "hit_rate_at_1")), 4
        ),
        lambda: retrieval("map_at_1000", ranked=True),
        lambda: retrieval("ndcg_at_10", ranked=True),
        lambda: retrieval("ndcg_at_3", same_ids=True),
        lambda: retrieval("ndcg_at_3", same_ids=True, ignore_identical_ids=False),
        lambda: retrieval("ndcg_at_3", ignore_identical_ids=True),
    ],
)
def test_tasks_without_training_match_exactly(make: Callable[[], AbsTask]) -> None:
    task = make()
    assert scores_together(task) is None
    expected = by_mteb(task)
    assert together(task) == pytest.approx(expected, abs=1e-6)
    assert len({round(value, 4) for value in expected}) > 1  # layers differ


@pytest.mark.parametrize("same_ids", [True, False])
def test_identical_ids_are_ignored_only_where_there_are_some(same_ids: bool) -> None:
    scores = [
        together(retrieval("ndcg_at_3", same_ids=same_ids, ignore_identical_ids=ignored)) for ignored in (True, False)
    ]
    assert (scores[0] != pytest.approx(scores[1], abs=1e-3)) == same_ids


@pytest.mark.long
@pytest.mark.parametrize("similarity", thinned(["dot", "euclidean", "manhattan"], 3))
def test_similarity_of_the_encoder_is_used(similarity: str) -> None:
    for task in (sts(main_score="spearman"), pairs("similarity_ap"), retrieval(), retrieval(ranked=True)):
        assert together(task, similarity) == pytest.approx(by_mteb(task, similarity), abs=1e-6), task.metadata
        assert together(task, similarity) != pytest.approx(together(task), abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        classification,
        pytest.param(lambda: classification("f1"), marks=pytest.mark.slow),
        pytest.param(lambda: classification(classes=2), marks=pytest.mark.slow),
        lambda: classification("ap", classes=2),
        lambda: classification(is_cross_validation=True, train_split="test", n_splits=3),
    ],
    ids=["five classes", "f1", "two classes", "average precision", "cross-validation"],
)
def test_classification_matches(make: Callable[[], AbsTask]) -> None:
    task = make()
    assert scores_together(task) is None
    # In float64 both take the same path; in float32 scikit-learn may stop elsewhere, which changes a few predictions.
    expected = by_mteb(task, dtype=np.float64)
    assert together(task, dtype=np.float64) == pytest.approx(expected, abs=1e-9)
    assert len(set(expected)) > 1  # layers differ


@pytest.mark.long
def test_clustering_matches_on_levels_splits_and_samples() -> None:
    task = clustering()
    assert scores_together(task) is None
    assert together(task) == pytest.approx(by_mteb(task), abs=0.005)
    shallow = clustering(max_depth=1)
    assert together(shallow) == pytest.approx(by_mteb(shallow), abs=0.005)
    assert together(shallow) != pytest.approx(together(task), abs=0.01)


@pytest.mark.slow
def test_small_budget_scores_layer_by_layer_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    for make in (sts, pairs, retrieval, classification, clustering):
        task = make()
        complete = together(task, done=counts.append)
        assert together(task, budget=1, done=counts.append) == pytest.approx(complete, abs=1e-9)
    assert set(counts) == {1, 3}
    monkeypatch.setattr(all_layers, "memory_budget", lambda _: 1)
    counts.clear()
    together(sts(), done=counts.append)
    assert counts == [1, 1, 1]


@pytest.mark.long
def test_layers_with_identical_or_nonfinite_vectors_have_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.scoring import made

    plain = made.vectors

    def odd(texts: list[str], layer: int) -> np.ndarray:
        actual = plain(texts, layer)
        if layer == 1:
            actual[:] = 1
        return actual

    before = {make: together(make(), dtype=np.float64) for make in (sts, pairs, classification, clustering)}
    monkeypatch.setattr(made, "vectors", odd)
    for make, complete in before.items():
        task = make()
        actual = together(task, dtype=np.float64)
        assert (actual[0], actual[2]) == pytest.approx((complete[0], complete[2]), abs=1e-9)
        assert np.isnan(actual[1])  # mteb would report chance, or ties
    monkeypatch.setattr(made, "vectors", lambda texts, layer: plain(texts, layer) * (np.nan if layer == 1 else 1))
    for make, complete in before.items():
        actual = together(make(), dtype=np.float64)
        assert (actual[0], actual[2]) == pytest.approx((complete[0], complete[2]), abs=1e-9)
        assert np.isnan(actual[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        retrieval,
        lambda: retrieval("map_at_1000"),
        lambda: retrieval("ndcg_at_3", same_ids=True),
        lambda: retrieval("recall_at_10", _top_k=12),
    ],
)
def test_corpus_read_in_blocks_matches_mteb(make: Callable[[], AbsTask], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of equal texts are in several blocks, and few queries are ranked at a time."""
    from tests.scoring import made

    task, plain = make(), made.vectors
    expected, resampled = by_mteb(task), together(task)
    monkeypatch.setattr(all_layers, "_WHOLE_LAYER", 0)
    rows: list[int] = []
    monkeypatch.setattr(made, "vectors", lambda texts, layer: rows.append(len(texts)) or plain(texts, layer))
    for documents in (1, 7, 59):
        monkeypatch.setattr(retrieval_scores, "_BLOCK", documents * plain(["a"], 0).shape[1])
        assert together(task) == pytest.approx(expected, abs=1e-6) == resampled
        assert max(rows) == max(documents, 11), "judged queries at once, documents block by block"
        rows.clear()


def test_layers_in_blocks_with_identical_or_nonfinite_vectors_have_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.scoring import made

    task, plain, counts = retrieval(), made.vectors, list[int]()
    complete = together(task)
    monkeypatch.setattr(all_layers, "_WHOLE_LAYER", 0)
    monkeypatch.setattr(retrieval_scores, "_BLOCK", 7 * plain(["a"], 0).shape[1])
    for odd in (lambda texts: np.ones_like(plain(texts, 1)), lambda texts: plain(texts, 1) * np.nan):
        monkeypatch.setattr(
            made, "vectors", lambda texts, layer, odd=odd: odd(texts) if layer == 1 else plain(texts, layer)
        )
        actual = together(task, done=counts.append)
        assert np.isnan(actual[1])
        assert (actual[0], actual[2]) == pytest.approx((complete[0], complete[2]), abs=1e-9)
    assert counts == [1] * 6


def test_out_of_memory_scores_fewer_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from midlayer_encoders.sweeping.scoring.pairs import StsPairs

    complete, plain, counts = together(sts()), StsPairs.bootstrap, list[int]()

    def small(self: StsPairs, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(len(vectors))
        if len(vectors) > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return plain(self, vectors)

    monkeypatch.setattr(StsPairs, "bootstrap", small)
    assert together(sts()) == pytest.approx(complete, abs=1e-12)
    assert counts == [3, 1, 2, 1, 1]


def test_products_are_not_rounded_to_tensorfloat32_and_the_setting_is_restored() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        recorded: list[str] = []
        together(sts(), done=lambda _: recorded.append(torch.get_float32_matmul_precision()))
        assert set(recorded) == {"highest"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("main_score", ["cosine_spearman", "pearson"])
def test_missing_grade_gives_no_score(main_score: str) -> None:
    task = sts(main_score=main_score, grades=[float("nan"), *(float(n % 4) for n in range(39))])
    assert np.isnan(by_mteb(task)).all()
    assert np.isnan(together(task)).all()


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (pairs(labels=(0, 2)), "must be 1 for positive pairs, else 0, but are \\[0, 2\\]"),
        (classification(names=[0.5, 1.25, 2.5, 3.5, 4.5]), "Unknown label type: continuous"),
    ],
)
def test_labels_refused_by_mteb_are_refused(task: AbsTask, reason: str) -> None:
    with pytest.raises(ValueError):
        by_mteb(task)
    with pytest.raises(ValueError, match=reason):
        together(task)


@pytest.mark.parametrize("cut", [3, 10])
@pytest.mark.parametrize("score", ["ndcg", "map", "recall", "precision"])
def test_cut_before_and_after_the_last_document_matches_trec_eval(score: str, cut: int) -> None:
    """The ideal ranking ends at the cut, too, and precision at 10 of six documents is a share of ten."""
    grades = [2, 0, 1, 1, 2, 1]  # in the order of the ranking
    names = [f"d{number}" for number in range(len(grades))]
    run = {"q": {name: float(len(names) - rank) for rank, name in enumerate(names)}}
    measure = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}[score]
    evaluator = pytrec_eval.RelevanceEvaluator({"q": dict(zip(names, grades, strict=True))}, {f"{measure}.{cut}"})
    expected = evaluator.evaluate(run)["q"][f"{measure}_{cut}"]
    gains, valid = torch.tensor(grades).float(), torch.ones(len(grades), dtype=torch.bool)
    ideal = gains.sort(descending=True).values
    assert ranking_score(gains, valid, ideal, score=score, cut=cut).item() == pytest.approx(expected)


def test_layers_are_reported_as_they_are_scored() -> None:
    class FirstEntry:
        def bootstrap(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return vectors[:, 0, 0].double(), vectors[:, 0, :0]

        def size_per_layer(self, rows: int, dim: int) -> int:
            return rows * dim

    def read(layer: int, keys: Sequence[str]) -> np.ndarray:
        return np.array([[layer, 1], [0, 2]], dtype=np.float32)

    for budget, expected in ((2 * 16, [2, 2, 1]), (2 * 16 + 15, [2, 2, 1]), (1, [1] * 5), (None, [5])):
        counts: list[int] = []
        scores = resampled_scores(FirstEntry(), ["a", "b"], [9, 3, 4, 1, 7], read, device=torch.device("cpu"),
                                  budget=budget, done=counts.append)  # fmt: skip
        assert scores == {9: [9], 3: [3], 4: [4], 1: [1], 7: [7]}
        assert counts == expected


def test_vectors_are_alike_up_to_rounding_relative_to_the_largest_entry() -> None:
    differences = torch.tensor([0.0, 0.5e-4, 2e-4, 1.0], dtype=torch.float64)
    vectors = torch.tensor([[100.0, -1.0], [100.0, -1.0]], dtype=torch.float64).repeat(4, 1, 1)
    vectors[:, 1, 1] += differences  # rounding is a millionth of 100
    assert all_alike(vectors, ["a", "b"]).tolist() == [True, True, False, False]
    assert all_alike(vectors, ["a", "a"]).tolist() == [False] * 4, "of one text"


def test_classifiers_and_clusterings_of_too_few_examples_are_refused() -> None:
    rows, vectors = torch.tensor([0, 1]), torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    one_class = ClassifierData(rows, torch.tensor([1, 1]), rows, rows)
    with pytest.raises(OptionError, match="of two or more classes, but has one"):
        Classifiers((one_class,)).bootstrap(vectors)[0]
    draws = Draws(rows[None], rows[None], clusters=3)
    with pytest.raises(OptionError, match=r"at least as many rows as clusters \(3\), but has 2"):
        Clusterings((draws,), batch_size=4, seed=0).bootstrap(vectors)[0]
