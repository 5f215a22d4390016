"""Clustering: the V-measure of mini-batch k-means, averaged over draws."""

from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.scoring.k_means import mini_batch_k_means
from midlayer_encoders.sweeping.scoring.resampling import v_measures

_LAYERS_ON_CPU = 4  # clustered at once


@dataclass(frozen=True)
class Draws:
    """R draws of S rows each, which are clustered together.

    Attributes:
        rows: shape ``(R, S)``.
        labels: of the rows, from 0, shape ``(R, S)``.
        clusters: number of clusters.
    """

    rows: Tensor
    labels: Tensor
    clusters: int


@dataclass(frozen=True)
class Clusterings:
    """The draws of a task, one entry for each level of labels, and the settings of mini-batch k-means."""

    draws: tuple[Draws, ...]
    batch_size: int
    seed: int

    def bootstrap(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the V-measure averaged over all draws ``(L,)``, and scores on resampled texts ``(L, S)``."""
        # All problems at once run until the last one stops, which only a GPU benefits from.
        size = _LAYERS_ON_CPU if vectors.device.type == "cpu" else len(vectors)
        values = torch.cat([self._v_measures(part) for part in torch.split(vectors, size)]).to(vectors.device)
        return values[:, 0], values[:, 1:]

    def _v_measures(self, vectors: Tensor) -> Tensor:
        total = torch.zeros(())
        for draws in self.draws:
            if draws.rows.shape[1] < draws.clusters:
                raise OptionError(
                    f"A draw must have at least as many rows as clusters ({draws.clusters}), but has "
                    f"{draws.rows.shape[1]}."
                )
            clusters = mini_batch_k_means(
                vectors, draws.rows, clusters=draws.clusters, batch_size=self.batch_size, seed=self.seed
            )
            total = total + len(draws.rows) * v_measures(draws.labels, clusters, draws.rows, vectors.shape[1])
        return total / sum(len(draws.rows) for draws in self.draws)

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        sizes = []
        for draws in self.draws:
            count, size = draws.rows.shape
            batch = min(self.batch_size, size)
            starting = rows * dim if rows <= 6 * batch else 3 * batch * count * dim
            stepping = rows * dim if rows <= 2 * batch else batch * count * dim
            distances = 3 * count * draws.clusters * max(rows, batch)
            sizes.append(3 * starting + 2 * stepping + distances + 4 * count * draws.clusters * dim)
        return 2 * rows * dim + max(sizes, default=0)
