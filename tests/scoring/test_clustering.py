"""Each layer is clustered by itself, by any number of threads."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from mteb.abstasks.clustering import _evaluate_clustering_bootstrapped

from midlayer_encoders.scoring.clustering import Clusterings
from midlayer_encoders.scoring.recording import _v_measures


@pytest.mark.parametrize("threads", [1, 3])
def test_the_scores_of_each_layer_are_mteb_s(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = [[n % 6, n % 3] for n in range(90)]
    centers = torch.randn(6, 8, generator=generator)
    vectors = centers[torch.arange(90) % 6] + 0.7 * torch.randn(4, 90, 8, generator=generator)
    rows = torch.randperm(90, generator=generator)
    settings = {"n_clusters": 4, "cluster_size": 60, "kmean_batch_size": 32, "max_depth": None, "seed": 42}
    shuffled = [labels[row] for row in rows.tolist()]
    clusterings = Clusterings(rows, partial(_v_measures, shuffled, {**settings, "rng_state": random.Random(1)}))
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        scores = clusterings.scores(vectors).tolist()
    finally:
        torch.set_num_threads(previous)
    for layer, score in zip(vectors[:, rows].numpy(), scores, strict=True):
        by_level, _ = _evaluate_clustering_bootstrapped(layer, shuffled, **settings, rng_state=random.Random(1))
        expected = [value for values in by_level["v_measure"].values() for value in values]
        assert len(expected) == 8
        assert score == pytest.approx(np.mean(expected), abs=1e-12)
    assert len(set(scores)) == 4


@pytest.mark.filterwarnings("error")
def test_equal_vectors_form_one_cluster() -> None:
    settings = {"n_clusters": 2, "cluster_size": 20, "kmean_batch_size": 16, "max_depth": None, "seed": 0}
    labels = [[n % 3] for n in range(30)]
    v_measures = partial(_v_measures, labels, {**settings, "rng_state": random.Random(0)})
    assert Clusterings(torch.arange(30), v_measures).scores(torch.ones(2, 30, 4)).tolist() == [0, 0]
