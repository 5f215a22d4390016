"""Ask how far rounding alone moves the clustering score of a layer: is the path of mini-batch k-means chaotic?

``python -m benchmarks.scoring_chaos TASK`` (a folder of a clustering task), on vectors made as in ``benchmarks/scoring_made.py``. Each draw
is clustered again with (a) the dimensions in another order, which changes no distance, only the rounding of products, in scikit-learn's
``MiniBatchKMeans`` as mteb runs it and in ours; (b) the sum of distances, by which k-means++ draws its centers, off by a rounding of
float32 (``6e-8`` of it), as where a GPU adds in another order. Printed are the draws whose V-measure differs, the largest difference
of one, and the change of the mean, in points.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import v_measure_score

from benchmarks.scoring_made import made
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.sweeping.scoring import k_means
from midlayer_encoders.sweeping.scoring.clustering import Clusterings, v_measure
from midlayer_encoders.sweeping.scoring.recording import record
from midlayer_encoders.tasks.sources import task_sources


def by_sklearn(vectors: torch.Tensor, question: Clusterings) -> torch.Tensor:
    """Return the V-measure of each draw of one layer ``(1, N, D)``, in points."""
    found = []
    for one in question.draws:
        for rows, labels in zip(one.rows, one.labels, strict=True):
            model = MiniBatchKMeans(one.clusters, batch_size=question.batch_size, n_init=1, random_state=question.seed)
            found.append(100 * v_measure_score(labels.numpy(), model.fit_predict(vectors[0][rows].numpy())))
    return torch.tensor(found)


def by_ours(vectors: torch.Tensor, question: Clusterings) -> torch.Tensor:
    """Return the same by ours."""
    found = []
    with torch.inference_mode():
        for one in question.draws:
            clusters = k_means.mini_batch_k_means(
                vectors, one.rows, clusters=one.clusters, batch_size=question.batch_size, seed=question.seed
            )
            found.append(100 * v_measure(one.labels.expand_as(clusters), clusters)[0])
    return torch.cat(found)


@contextmanager
def rounded_sums(seed: int) -> Iterator[None]:
    """Have the sums of distances differ by a rounding."""
    generator, plain = np.random.RandomState(seed), k_means._KMeans._candidates

    def candidates(self: Any, closest: torch.Tensor, uniform: Any) -> torch.Tensor:
        return plain(self, closest, uniform * (1 + 6e-8 * generator.randn()))

    k_means._KMeans._candidates = candidates  # type: ignore[method-assign]
    try:
        yield
    finally:
        k_means._KMeans._candidates = plain  # type: ignore[method-assign]


def apart(one: torch.Tensor, others: list[torch.Tensor]) -> str:
    """Return a cell: draws that differ, the largest difference of one, and the largest change of the mean."""
    changes = torch.stack(others) - one
    moved = int((changes.abs() > 0.01).sum())
    return f"{moved} of {changes.numel()}; {changes.abs().max():.2f}; {changes.mean(dim=1).abs().max():.2f}"


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--times", type=int, default=4)
    given = parser.parse_args()

    def keys(inputs: Any, **_: Any) -> list[str]:
        return [text for batch in inputs for text in batch["text"]]

    with isolated_random():
        asked = record(task_sources(given.task)[0].make(), keys)[0]
    question: Any = asked.scorer
    vectors = torch.from_numpy(made(asked.keys, given.layers, given.dim, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(given.dim, generator=generator) for _ in range(given.times)]
    print(
        "| layer | scikit-learn | ours | spread of the draws | scikit-learn, other orders | ours, other orders | ours, sums rounded |"
    )
    print("|---|---|---|---|---|---|---|")
    for layer in range(given.layers):
        plain = vectors[layer : layer + 1]
        each = [plain[..., order].contiguous() for order in orders]
        theirs, ours = by_sklearn(plain, question), by_ours(plain, question)
        rounded = []
        for seed in range(given.times):
            with rounded_sums(seed):
                rounded.append(by_ours(plain, question))
        cells = [f"{theirs.mean():.2f}", f"{ours.mean():.2f}", f"{theirs.std():.2f}"]
        cells += [apart(theirs, [by_sklearn(one, question) for one in each])]
        cells += [apart(ours, [by_ours(one, question) for one in each]), apart(ours, rounded)]
        print(f"| {layer} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
