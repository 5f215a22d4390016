"""Clustering: the V-measure of mini-batch k-means, averaged over draws."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor


@dataclass(frozen=True)
class Clusterings:
    """The examples of a task, and mteb's function that clusters draws of them.

    Attributes:
        rows: row of each of N examples.
        v_measures: returns the V-measure of each draw from vectors ``(N, D)``.
    """

    rows: Tensor
    v_measures: Callable[[Any], Sequence[float]]

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the V-measure at each layer, averaged over all draws, shape ``(L,)``."""
        return self.draw_scores(vectors).mean(dim=1)

    def draw_scores(self, vectors: Tensor) -> Tensor:
        """Return the V-measure of each draw at each layer, shape ``(L, R)``; each thread clusters another layer."""
        layers = vectors[:, self.rows.to(vectors.device)].cpu().numpy()
        one_thread = partial(threadpool_limits, 1)  # OpenMP has a limit for each thread that calls it
        pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=one_thread)
        with one_thread(), warnings.catch_warnings(), pool:
            warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct rows than clusters
            scores = list(pool.map(self.v_measures, layers))
        return torch.tensor(scores, dtype=torch.float64, device=vectors.device)

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        return 2 * (rows + len(self.rows)) * dim
