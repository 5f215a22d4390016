"""Parallel mini-batch k-means matches scikit-learn with the same random numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import v_measure_score
from torch import Tensor

from midlayer_encoders.sweeping.scoring.clustering import Clusterings, Draws
from midlayer_encoders.sweeping.scoring.k_means import mini_batch_k_means
from midlayer_encoders.sweeping.scoring.resampling import v_measures


def blobs(layers: int, rows: int, dim: int, clusters: int, *, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.arange(rows) % clusters
    centers = torch.randn(clusters, dim, generator=generator)
    return centers[labels] + 0.7 * torch.randn(layers, rows, dim, generator=generator) + offset, labels


def of_sklearn(rows: Any, clusters: int, batch_size: int, seed: int) -> Any:
    model = MiniBatchKMeans(n_clusters=clusters, batch_size=batch_size, n_init=1, random_state=seed)
    return model.fit_predict(rows.numpy())


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "clusters", "size", "batch", "offset"),
    [
        (60, 5, 256, 64, 0.0),  # few distinct rows
        (60, 5, 256, 64, 3.0),  # far from the origin
        (600, 5, 256, 64, 0.0),  # many
        (80, 7, 40, 512, 0.0),  # a batch larger than a draw
        (1000, 50, 1000, 128, 0.0),  # clusters without rows are put elsewhere; no row twice, so that no two centers tie
    ],
)
def test_cluster_assignments_match_scikit_learn(rows: int, clusters: int, size: int, batch: int, offset: float) -> None:
    vectors, _ = blobs(3, rows, 16, clusters, offset=offset)
    generator = torch.Generator().manual_seed(1)
    if size == rows:
        figure = torch.stack([torch.randperm(rows, generator=generator) for _ in range(4)])
    else:
        figure = torch.randint(rows, (4, size), generator=generator)
    actual = mini_batch_k_means(vectors, figure, clusters=clusters, batch_size=batch, seed=42)
    for layer in range(3):
        for draw in range(4):
            expected = of_sklearn(vectors[layer, figure[draw]], clusters, batch, 42)
            np.testing.assert_array_equal(actual[layer, draw].numpy(), expected)


def test_another_seed_starts_with_other_centers() -> None:
    vectors, _ = blobs(1, 100, 8, 6)
    figure = torch.arange(100)[None]
    first, second = (
        mini_batch_k_means(vectors, figure, clusters=6, batch_size=32, seed=seed)[0, 0].numpy() for seed in (42, 43)
    )
    np.testing.assert_array_equal(second, of_sklearn(vectors[0], 6, 32, 43))
    assert (first != second).any()


def test_identical_vectors_form_one_cluster() -> None:
    vectors, labels = torch.ones(2, 30, 4), torch.arange(30)[None] % 3
    scores = Clusterings((Draws(torch.arange(30)[None], labels, 3),), batch_size=16, seed=0).bootstrap(vectors)[0]
    assert scores.tolist() == [0, 0]


def test_v_measure_matches_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, clusters = (torch.randint(k, (2, 3, 50), generator=generator) for k in (4, 6))
    labels, clusters[0, 0] = labels[0], 0
    labels[0] = 0
    expected = [
        np.mean([v_measure_score(*draw) for draw in zip(labels.numpy(), layer, strict=True)])
        for layer in clusters.numpy()
    ]
    rows = torch.arange(50).expand(3, -1)
    assert v_measures(labels, clusters, rows, 50)[:, 0].tolist() == pytest.approx(expected, abs=1e-12)
