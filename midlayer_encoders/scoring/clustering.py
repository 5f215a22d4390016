"""Clustering: how well mini-batch k-means finds the labels, the mean over draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.scoring.k_means import mini_batch_k_means

_LAYERS_ON_CPU = 4  # that are clustered side by side


def v_measure(wanted: Tensor, found: Tensor) -> Tensor:
    r"""Return the V-measure :math:`2 I(Y; C) / (H(Y) + H(C))` of each row of clusters.

    Args:
        wanted: labels from 0, shape ``(*, S)``.
        found: clusters from 0, shape ``(*, S)``.

    Example:
        >>> v_measure(torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]]), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]))
        tensor([1., 0.], dtype=torch.float64)
    """
    rows, columns = int(wanted.max()) + 1, int(found.max()) + 1
    cells = (wanted * columns + found).flatten(0, -2)
    table = torch.zeros(len(cells), rows * columns, dtype=torch.float64, device=cells.device)
    table.scatter_add_(1, cells, torch.ones_like(cells, dtype=torch.float64))
    table = (table / cells.shape[1]).view(-1, rows, columns)
    by_label, by_cluster, both = (
        -torch.xlogy(p, p).sum(dim=1) for p in (table.sum(dim=2), table.sum(dim=1), table.flatten(1))
    )
    shared, total = (by_label + by_cluster - both).clamp(min=0), by_label + by_cluster
    score = torch.where(total > 0, 2 * shared / total.clamp(min=1e-300), 1)
    return score.view(found.shape[:-1])


@dataclass(frozen=True)
class Draws:
    """Rows that are clustered together.

    Attributes:
        rows: shape ``(R, S)``.
        labels: of the rows, from 0, shape ``(R, S)``.
        clusters: number of clusters to find.
    """

    rows: Tensor
    labels: Tensor
    clusters: int


def clustering_scores(vectors: Tensor, draws: Sequence[Draws], *, batch_size: int, seed: int) -> Tensor:
    """Return the V-measure at each layer, the mean over all draws.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        draws: one for each level of labels.
        batch_size: of mini-batch k-means.
        seed: likewise.
    """
    found = []
    for one in draws:
        if one.rows.shape[1] < one.clusters:
            raise OptionError(f"{one.clusters} clusters need as many rows, but a draw has {one.rows.shape[1]}.")
        labels = mini_batch_k_means(vectors, one.rows, clusters=one.clusters, batch_size=batch_size, seed=seed)
        found.append(v_measure(one.labels.to(labels.device).expand_as(labels), labels))
    return torch.cat(found, dim=1).mean(dim=1)


@dataclass(frozen=True)
class Clusterings:
    """The draws of a task, and how they are clustered: arguments of :func:`clustering_scores`."""

    draws: tuple[Draws, ...]
    batch_size: int
    seed: int

    def scores(self, vectors: Tensor) -> Tensor:
        """Return one score for each layer, shape ``(L,)``."""
        # All draws side by side go on until the last one stops, which a CPU has no use for.
        size = _LAYERS_ON_CPU if vectors.device.type == "cpu" else len(vectors)
        parts = torch.split(vectors, size)
        return torch.cat(
            [clustering_scores(part, self.draws, batch_size=self.batch_size, seed=self.seed) for part in parts]
        )

    def numbers(self, rows: int, dim: int) -> int:
        """Return about how many numbers of four bytes a layer takes."""
        each = []
        for one in self.draws:
            count, size = one.rows.shape
            batch = min(self.batch_size, size)
            starting = rows * dim if rows <= 6 * batch else 3 * batch * count * dim
            stepping = rows * dim if rows <= 2 * batch else batch * count * dim
            distances = 3 * count * one.clusters * max(rows, batch)
            each.append(3 * starting + 2 * stepping + distances + 4 * count * one.clusters * dim)
        return 2 * rows * dim + max(each, default=0)
