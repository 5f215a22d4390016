"""Clustering: the V-measure of mini-batch k-means, averaged over draws."""

from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.scoring.k_means import mini_batch_k_means
from midlayer_encoders.sweeping.scoring.resampling import resampled_v_measures

_LAYERS_ON_CPU = 4  # clustered at once


def v_measure(labels: Tensor, clusters: Tensor) -> Tensor:
    r"""Return the V-measure :math:`2 I(Y; C) / (H(Y) + H(C))` of each row of clusters.

    Args:
        labels: from 0, shape ``(*, S)``.
        clusters: from 0, shape ``(*, S)``.

    Example:
        >>> v_measure(torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]]), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]))
        tensor([1., 0.], dtype=torch.float64)
    """
    rows, columns = int(labels.max()) + 1, int(clusters.max()) + 1
    cells = (labels * columns + clusters).flatten(0, -2)
    table = torch.zeros(len(cells), rows * columns, dtype=torch.float64, device=cells.device)
    table.scatter_add_(1, cells, torch.ones_like(cells, dtype=torch.float64))
    table = (table / cells.shape[1]).view(-1, rows, columns)
    by_label, by_cluster, both = (
        -torch.xlogy(p, p).sum(dim=1) for p in (table.sum(dim=2), table.sum(dim=1), table.flatten(1))
    )
    total = by_label + by_cluster
    shared = (total - both).clamp(min=0)
    score = torch.where(total > 0, 2 * shared / total.clamp(min=1e-300), 1)
    return score.view(clusters.shape[:-1])


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

    def resampled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the V-measure averaged over all draws ``(L,)``, and scores on resampled texts ``(L, S)``."""
        # All problems at once run until the last one stops, which only a GPU benefits from.
        size = _LAYERS_ON_CPU if vectors.device.type == "cpu" else len(vectors)
        parts = [self._resampled(part) for part in torch.split(vectors, size)]
        return torch.cat([scores.mean(dim=1) for scores, _ in parts]), torch.cat([values for _, values in parts])

    def _resampled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        scores, resampled = [], []
        for draws in self.draws:
            if draws.rows.shape[1] < draws.clusters:
                raise OptionError(
                    f"A draw must have at least as many rows as clusters ({draws.clusters}), but has "
                    f"{draws.rows.shape[1]}."
                )
            clusters = mini_batch_k_means(
                vectors, draws.rows, clusters=draws.clusters, batch_size=self.batch_size, seed=self.seed
            )
            scores.append(v_measure(draws.labels.to(clusters.device).expand_as(clusters), clusters))
            means = resampled_v_measures(draws.labels, clusters, draws.rows, vectors.shape[1])
            resampled.append(len(draws.rows) * means)
        total = torch.stack(resampled).sum(dim=0)
        return torch.cat(scores, dim=1), total / sum(len(draws.rows) for draws in self.draws)

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
