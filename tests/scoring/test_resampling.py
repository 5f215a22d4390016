"""Scores on resampled items equal the definition on items that are repeated as often as they were drawn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score, average_precision_score, v_measure_score

from midlayer_encoders.sweeping.scoring import resampled_scores, resampling
from midlayer_encoders.sweeping.scoring.classification import ClassifierData, Classifiers
from midlayer_encoders.sweeping.scoring.clustering import Clusterings, Draws
from midlayer_encoders.sweeping.scoring.k_means import mini_batch_k_means
from midlayer_encoders.sweeping.scoring.pairs import MEASURES, LabeledPairs, StsPairs, pair_similarities
from midlayer_encoders.sweeping.scoring.resampling import resampled_counts
from midlayer_encoders.sweeping.scoring.retrieval import Ranking, make_ranking

LAYERS, ITEMS, DIM = 3, 12, 4
VECTORS = torch.randn(LAYERS, 24, DIM, generator=torch.Generator().manual_seed(0))
FIRST, SECOND = torch.arange(ITEMS), torch.arange(ITEMS, 2 * ITEMS)
GOLD = torch.tensor([0.0, 1, 2, 3, 4, 5] * 2, dtype=torch.float64)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "RESAMPLES", 25)  # scikit-learn takes milliseconds for each


def brute_force(score: Callable[[int, np.ndarray], float], items: int = ITEMS) -> np.ndarray:
    """Score each layer on the drawn items, each repeated as often as it was drawn, shape ``(L, S)``."""
    counts = torch.cat(list(resampled_counts(items)), dim=1).numpy().astype(int)
    draws = [np.repeat(np.arange(items), column) for column in counts.T]
    return np.array([[score(layer, draw) for draw in draws] for layer in range(LAYERS)])


def assert_resampled(scorer: Any, expected: np.ndarray) -> None:
    scores, resampled = scorer.bootstrap(VECTORS)
    assert torch.equal(scores, scorer.bootstrap(VECTORS)[0])
    assert resampled.shape == (LAYERS, resampling.RESAMPLES)
    assert len(np.unique(np.round(expected, 6))) > 9  # the oracle varies
    np.testing.assert_allclose(resampled.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize("items", [10, 12, 1000])
def test_each_resample_draws_as_many_items_as_there_are(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (counts,) = resampled_counts(items)
    assert counts.shape == (items, resampling.RESAMPLES)
    assert (counts.sum(dim=0) == items).all()
    assert counts.mean() == 1
    monkeypatch.setattr(resampling, "_BLOCK", 7 * items)
    blocks = list(resampled_counts(items))
    assert len(blocks) == -(-resampling.RESAMPLES // 7)
    assert torch.equal(torch.cat(blocks, dim=1), counts)  # large tasks draw the same items in several blocks


@pytest.mark.parametrize("kind", ["spearman", "pearson"])
def test_correlation(kind: str) -> None:
    values = pair_similarities(VECTORS, FIRST, SECOND, measure="manhattan").double().numpy()
    gold = GOLD.numpy()
    if kind == "spearman":  # of the ranks among all pairs
        values, gold = stats.rankdata(values, axis=1), stats.rankdata(gold)
    expected = brute_force(lambda layer, draw: stats.pearsonr(values[layer, draw], gold[draw])[0])
    assert_resampled(StsPairs(FIRST, SECOND, GOLD, f"manhattan_{kind}"), expected)


def test_correlation_is_undefined_if_the_drawn_targets_are_equal() -> None:
    pairs = StsPairs(FIRST, SECOND, torch.tensor([0.0] * 11 + [1.0]), "cosine_pearson")
    (counts,) = resampled_counts(ITEMS)
    constant = counts[11] == 0
    assert 0 < constant.sum() < resampling.RESAMPLES
    assert torch.equal(pairs.bootstrap(VECTORS)[1].isnan(), constant.expand(LAYERS, -1))


@pytest.mark.parametrize("score", ["cosine_ap", "max_ap"])
@pytest.mark.parametrize("ties", [False, True])
def test_average_precision(score: str, ties: bool) -> None:
    vectors = VECTORS.round() if ties else VECTORS  # vectors of few values have equal similarities
    labels = torch.tensor([1, 0, 0, 1] * 3)
    names = ["cosine"] if score == "cosine_ap" else [*MEASURES]
    values = np.stack([pair_similarities(vectors, FIRST, SECOND, measure=name).double().numpy() for name in names])
    best = [max(range(len(names)), key=lambda name: average_precision_score(labels, values[name, layer])) for layer in range(LAYERS)]  # fmt: skip

    def precision(layer: int, draw: np.ndarray) -> float:
        if not labels[draw].any():
            return float("nan")
        return float(average_precision_score(labels[draw], values[best[layer], layer, draw]))

    pairs = LabeledPairs(FIRST, SECOND, labels, score)
    np.testing.assert_allclose(pairs.bootstrap(vectors)[1].numpy(), brute_force(precision), atol=1e-6)


def ranking(score: str) -> Ranking:
    queries = {f"q{number}": number for number in range(ITEMS)}
    documents = {f"d{number}": number for number in range(ITEMS, 2 * ITEMS)}
    relevant = {
        f"q{number}": {f"d{ITEMS + number}": 1, f"d{ITEMS + (number + 5) % ITEMS}": 2} for number in range(ITEMS)
    }
    return make_ranking(queries, documents, relevant, score=score)


@pytest.mark.parametrize("score", ["ndcg_at_10", "mrr_at_5"])
def test_mean_over_queries(score: str) -> None:
    whole = ranking(score)
    by_query = np.stack([_one_query(whole, place).bootstrap(VECTORS)[0].numpy() for place in range(ITEMS)], axis=1)
    expected = brute_force(lambda layer, draw: by_query[layer, draw].mean())
    scores, resampled = whole.bootstrap(VECTORS)
    assert torch.equal(scores, whole.bootstrap(VECTORS)[0])
    np.testing.assert_allclose(resampled.numpy(), expected, atol=1e-5)  # scores of single queries are rounded


def _one_query(whole: Ranking, place: int) -> Ranking:
    only = slice(place, place + 1)
    return replace(whole, queries=whole.queries[only], relevance=whole.relevance[only], outside=whole.outside[only], same=whole.same[only])  # fmt: skip


def test_accuracy_of_several_classifiers() -> None:
    train_labels = torch.tensor([0, 1, 0, 1])
    test_labels = torch.tensor([0, 1, 2] * 4)
    data = tuple(ClassifierData(train, train_labels, SECOND, test_labels) for train in FIRST.split(4))
    data += (ClassifierData(FIRST[:6], torch.tensor([0, 1, 2] * 2), SECOND, test_labels),)  # of other classes
    classifiers = Classifiers(data)
    predicted = [classifiers.predictions(VECTORS, [each])[:, 0].numpy() for each in data]

    def accuracy(layer: int, draw: np.ndarray) -> float:
        return float(np.mean([accuracy_score(test_labels[draw], labels[layer, draw]) for labels in predicted]))

    assert_resampled(classifiers, brute_force(accuracy))
    by_measure = replace(classifiers, measure=lambda *_: 0.5)
    assert by_measure.bootstrap(VECTORS)[1].shape == (LAYERS, 0)  # the measure may not be a mean over items


def test_accuracy_of_test_sets_of_different_size_has_their_mean() -> None:
    labels = torch.tensor([0, 1] * 6)
    folds = [(FIRST[:8], FIRST[8:]), (FIRST[4:], FIRST[:4]), (FIRST[6:], FIRST[:6])]
    data = tuple(ClassifierData(train, labels[train], test, labels[test]) for train, test in folds)
    scores, resampled = Classifiers(data).bootstrap(VECTORS)
    assert resampled.mean(dim=1) == pytest.approx(scores, abs=0.05)


@pytest.mark.long
def test_v_measure_of_resampled_texts() -> None:
    rows = torch.randint(24, (2, 30), generator=torch.Generator().manual_seed(1))  # mteb repeats texts
    labels = torch.arange(24) % 3
    levels = tuple(Draws(rows, codes[rows], clusters=3) for codes in (labels, labels // 2))
    clusterings = Clusterings(levels, batch_size=16, seed=0)
    clusters = mini_batch_k_means(VECTORS, rows, clusters=3, batch_size=16, seed=0).numpy()

    def mean(layer: int, draw: np.ndarray) -> float:
        counts = np.bincount(draw, minlength=24)
        scores = []
        for level in levels:
            for texts, truth, found in zip(level.rows.numpy(), level.labels.numpy(), clusters[layer], strict=True):
                scores.append(v_measure_score(np.repeat(truth, counts[texts]), np.repeat(found, counts[texts])))
        return float(np.mean(scores))

    assert_resampled(clusterings, brute_force(mean, items=24))


def test_fewer_than_ten_items_are_not_resampled() -> None:
    """Of two pairs, every resample without a constant gives the same difference, which would look certain."""
    labels = torch.arange(8) % 2
    few = FIRST[:9], SECOND[:9]
    queries = {f"q{number}": number for number in range(9)}
    documents = {f"d{number}": number for number in range(9, 24)}
    relevant = {name: {"d9": 1} for name in queries}
    scorers: list[Any] = [
        StsPairs(*few, GOLD[:9], "cosine_spearman"),
        StsPairs(FIRST[:2], SECOND[:2], GOLD[:2], "cosine_spearman"),
        LabeledPairs(*few, (GOLD[:9] > 2).long(), "max_ap"),
        make_ranking(queries, documents, relevant, score="ndcg_at_10"),
        Classifiers((ClassifierData(FIRST[:8], labels, SECOND[:8], labels),)),
    ]
    for scorer in scorers:
        scores, resampled = scorer.bootstrap(VECTORS)
        assert scores.shape == (LAYERS,)
        assert resampled.shape == (LAYERS, 0), scorer
    clusterings = Clusterings((Draws(torch.arange(9)[None], labels[torch.arange(9) % 8][None], clusters=2),), 16, 0)
    assert clusterings.bootstrap(VECTORS[:, :9])[1].shape == (LAYERS, 0)


def test_layers_without_vectors_have_no_resamples_and_equal_layers_equal_ones() -> None:
    vectors = VECTORS.clone()
    vectors[1] = vectors[0]
    vectors[2, 0, 0] = torch.nan
    pairs = StsPairs(FIRST, SECOND, GOLD, "cosine_spearman")
    keys = [str(row) for row in range(24)]
    options: Any = {"device": torch.device("cpu")}
    values = resampled_scores(pairs, keys, range(LAYERS), lambda layer, _: vectors[layer].numpy(), **options)
    assert values[0] == values[1]
    assert len(values[0]) == 1 + resampling.RESAMPLES
    assert np.isnan(values[2]).all()
