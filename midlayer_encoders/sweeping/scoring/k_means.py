"""scikit-learn's mini-batch k-means for many layers and draws at once, with the same random numbers and names."""

from copy import deepcopy
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Flags: TypeAlias = npt.NDArray[np.bool_]

# Defaults of scikit-learn's MiniBatchKMeans.
_MAX_ITER = 100
_MAX_NO_IMPROVEMENT = 10
_REASSIGNMENT_RATIO = 0.01


def mini_batch_k_means(vectors: Tensor, drawn: Tensor, *, clusters: int, batch_size: int, seed: int) -> Tensor:
    """Return the cluster of every row of every draw, shape ``(L, R, S)``.

    This is scikit-learn's ``MiniBatchKMeans(clusters, batch_size=batch_size, n_init=1, random_state=seed)`` on each
    draw at each layer. Its random numbers depend on the vectors only through the steps at which centers with few rows
    are reassigned, so a few generators serve all layers and draws.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``, float32.
        drawn: rows of each of R draws, shape ``(R, S)``.
        clusters: number of clusters.
        batch_size: rows per step.
        seed: scikit-learn's ``random_state``.
    """
    # Clusters do not depend on the origin, and vectors of small norm have more accurate distances.
    vectors = vectors - vectors.double().mean(dim=1, keepdim=True).to(vectors.dtype)
    return _MiniBatchKMeans(vectors, drawn.to(vectors.device), clusters, batch_size, seed).labels()


class _MiniBatchKMeans:
    """P = L R problems, numbered ``layer * R + draw``, which is the first dimension of most tensors."""

    def __init__(self, vectors: Tensor, drawn: Tensor, n_clusters: int, batch_size: int, seed: int) -> None:
        self.vectors = vectors
        self.drawn = drawn.repeat(len(vectors), 1)  # (P, S)
        self.layers = torch.arange(len(vectors), device=drawn.device).repeat_interleave(len(drawn))[:, None]
        self.n_clusters = n_clusters
        self.n_samples = drawn.shape[1]
        self.batch_size = min(batch_size, self.n_samples)
        self.random_state = np.random.RandomState(seed)

    def labels(self) -> Tensor:
        """Return the cluster of each row, shape ``(L, R, S)``."""
        least = 3 * self.batch_size if 3 * self.batch_size >= self.n_clusters else 3 * self.n_clusters
        init_size = min(least, self.n_samples)
        self.random_state.randint(0, self.n_samples, init_size)  # scikit-learn compares initializations on these
        centers = self._mini_batch_steps(self._init_centroids(init_size))
        labels = self._nearest(self.vectors, centers)[0]
        return labels.gather(1, self.drawn).view(len(self.vectors), -1, self.n_samples)

    def _points(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors that contain the rows ``(P, M)`` of each problem, and the place of each row among them.

        All vectors of a layer ``(L, N, D)``, if its draws share most of their rows; otherwise ``(P, M, D)``.
        """
        if self.vectors.shape[1] <= 2 * rows.shape[1]:
            return self.vectors, rows
        return self.vectors[self.layers, rows], torch.arange(rows.shape[1], device=rows.device).expand_as(rows)

    def _init_centroids(self, init_size: int) -> Tensor:
        """Return the initial centers of greedy k-means++, ``(P, K, D)``."""
        indices = np.arange(self.n_samples)
        if init_size < self.n_samples:
            indices = self.random_state.randint(0, self.n_samples, init_size)
        rows = self.drawn[:, torch.from_numpy(indices).to(self.drawn.device)]
        points, places = self._points(rows)
        points = points.double()  # as in scikit-learn, which rounds the distances afterwards
        norms = points.square().sum(dim=2).repeat_interleave(len(rows) // len(points), dim=0)

        def distances(candidates: Tensor) -> Tensor:
            """Return squared distances from T candidates to all rows, ``(P, T, I)``."""
            centers = self.vectors[self.layers, candidates].double()
            squared = centers.square().sum(dim=2, keepdim=True) - 2 * _products(points, centers) + norms[:, None]
            squared = squared.clamp(min=0).to(self.vectors.dtype)
            return squared.gather(2, places[:, None].expand(-1, candidates.shape[1], -1))

        n_local_trials = 2 + int(np.log(self.n_clusters))
        first = int(self.random_state.choice(init_size, p=self._probabilities(init_size)))
        centers = [rows[:, first]]
        closest = distances(rows[:, first, None])[:, 0]
        for _ in range(1, self.n_clusters):
            drawn = _draw_by_weight(closest, self.random_state.uniform(size=n_local_trials))
            candidates = rows.gather(1, drawn)
            potentials = torch.minimum(closest[:, None], distances(candidates))
            best = potentials.sum(dim=2).argmin(dim=1, keepdim=True)
            closest = potentials.gather(1, best[..., None].expand(-1, 1, potentials.shape[2]))[:, 0]
            centers.append(candidates.gather(1, best)[:, 0])
        return self.vectors[self.layers, torch.stack(centers, dim=1)]

    def _probabilities(self, count: int) -> npt.NDArray[Any]:
        """Return equal probabilities, rounded like scikit-learn's."""
        ones = np.ones(count, dtype=np.float32 if self.vectors.dtype == torch.float32 else np.float64)
        return np.asarray(ones / ones.sum())

    def _nearest(self, points: Tensor, centers: Tensor, active: _Flags | None = None) -> tuple[Tensor, Tensor]:
        """Return each point's nearest center and its squared distance minus the point's squared norm, ``(P, M)``."""
        distances = centers.square().sum(dim=2, keepdim=True) - 2 * _products(points, centers, active)
        least = distances.min(dim=1)
        return least.indices, least.values

    def _mini_batch_steps(self, centers: Tensor) -> Tensor:
        """Return the final centers."""
        count, device = len(centers), centers.device
        weight_sums = np.zeros((count, self.n_clusters), dtype=np.float32)
        probabilities = self._probabilities(self.n_samples)
        generators = [self.random_state]
        generator = np.zeros(count, dtype=np.int64)  # the number of each problem's
        active = np.ones(count, dtype=bool)
        n_since_last_reassign, no_improvement = np.zeros((2, count), dtype=np.int64)
        ewa_inertia, ewa_inertia_min = np.full((2, count), np.inf)
        alpha = min(2 * self.batch_size / (self.n_samples + 1), 1)
        for step in range(_MAX_ITER * self.n_samples // self.batch_size):
            indices = np.zeros((count, self.batch_size), dtype=np.int64)
            for number in np.unique(generator[active]):
                drawn = generators[number].choice(self.n_samples, self.batch_size, p=probabilities, replace=True)
                indices[generator == number] = drawn
            rows = self.drawn.gather(1, torch.from_numpy(indices).to(device))
            n_since_last_reassign += self.batch_size
            due = (weight_sums == 0).any(axis=1) | (n_since_last_reassign >= 10 * self.n_clusters)
            n_since_last_reassign[due] = 0
            new_centers, new_sums, inertia = self._mini_batch_step(rows, centers, weight_sums, active)
            centers = torch.where(torch.from_numpy(active).to(device)[:, None, None], new_centers, centers)
            weight_sums[active] = new_sums[active]
            to_reassign = weight_sums < _REASSIGNMENT_RATIO * weight_sums.max(axis=1, keepdims=True)
            to_reassign &= (due & active)[:, None]
            moving = to_reassign.any(axis=1)
            for number in np.unique(generator[moving]):
                members = moving & (generator == number)
                generators.append(deepcopy(generators[number]))
                generator[members] = len(generators) - 1
                order = generators[-1].permutation(self.batch_size)  # `choice` without replacement takes the first
                for problem in np.flatnonzero(members):
                    self._reassign(
                        int(problem), to_reassign[problem], weight_sums[problem], centers, rows[problem, order]
                    )
            if step > 0:  # the first inertia belongs to the initial centers
                mean = inertia / self.batch_size
                ewa_inertia = mean if step == 1 else ewa_inertia * (1 - alpha) + mean * alpha
                no_improvement = np.where(ewa_inertia < ewa_inertia_min, 0, no_improvement + 1)
                ewa_inertia_min = np.minimum(ewa_inertia, ewa_inertia_min)
                active &= no_improvement < _MAX_NO_IMPROVEMENT
            if not active.any():
                break
        return centers

    def _mini_batch_step(
        self, rows: Tensor, centers: Tensor, weight_sums: npt.NDArray[np.float32], active: _Flags
    ) -> tuple[Tensor, npt.NDArray[np.float32], npt.NDArray[np.float64]]:
        """Return the centers and weight sums after a batch of rows ``(P, B)``, and its inertia with the old centers.

        Results of problems that are not ``active`` are undefined.
        """
        points, places = self._points(rows)
        labels, least = self._nearest(points, centers, active)
        norms = points.square().sum(dim=2).repeat_interleave(len(rows) // len(points), dim=0)
        inertia = (least + norms).clamp(min=0).gather(1, places).sum(dim=1)
        # How often each point is in each cluster.
        counts = centers.new_zeros(len(rows), self.n_clusters * points.shape[1])
        cells = labels.gather(1, places) * points.shape[1] + places
        counts.scatter_add_(1, cells, torch.ones_like(cells, dtype=counts.dtype))
        counts = counts.view(len(rows), self.n_clusters, -1)
        added = counts.sum(dim=2)
        old_sums = torch.from_numpy(weight_sums).to(centers)
        new_sums = old_sums + added
        sums = _products(points.mT, counts, active)
        new_centers = (centers * old_sums[..., None] + sums) / new_sums.clamp(min=1)[..., None]
        new_centers = torch.where((added > 0)[..., None], new_centers, centers)
        on_host = torch.cat([new_sums, inertia[:, None]], dim=1).cpu().numpy()
        return new_centers, on_host[:, :-1], on_host[:, -1].astype(np.float64)

    def _reassign(
        self, problem: int, to_reassign: _Flags, weight_sums: npt.NDArray[np.float32], centers: Tensor, rows: Tensor
    ) -> None:
        """Move a problem's centers with few rows to rows of the batch, in place."""
        if to_reassign.sum() > 0.5 * self.batch_size:
            to_reassign[np.argsort(weight_sums)[int(0.5 * self.batch_size) :]] = False
        clusters = torch.from_numpy(np.flatnonzero(to_reassign)).to(rows.device)
        centers[problem, clusters] = self.vectors[self.layers[problem], rows[: len(clusters)]]
        weight_sums[to_reassign] = weight_sums[~to_reassign].min()


def _draw_by_weight(weights: Tensor, uniform: npt.NDArray[np.float64]) -> Tensor:
    """Return places drawn with probabilities proportional to the weights ``(P, I)``, shape ``(P, T)``."""
    # Cumulative float32 sums on the host, as in scikit-learn: a sum in another order may draw another row and so
    # change the clusters.
    rows = weights.cpu().numpy()
    sums, totals = np.cumsum(rows, axis=1), rows @ np.ones(rows.shape[1], dtype=rows.dtype)
    drawn = [np.searchsorted(row, uniform * total) for row, total in zip(sums, totals, strict=True)]
    return torch.from_numpy(np.minimum(np.stack(drawn), sums.shape[1] - 1)).to(weights.device)


def _products(points: Tensor, centers: Tensor, active: _Flags | None = None) -> Tensor:
    """Return the products of each problem's centers ``(P, K, D)`` with its points, shape ``(P, K, M)``.

    The points ``(G, M, D)`` of a group serve P / G problems. They are on the left because some CPU libraries are ten
    times slower otherwise. A CPU leaves zeros for problems that are not ``active``; a GPU computes all at once.
    """
    groups = centers.reshape(len(points), -1, *centers.shape[1:])
    if points.device.type != "cpu":
        return torch.bmm(points, groups.flatten(1, 2).mT).mT.reshape(*centers.shape[:2], -1)
    products = centers.new_zeros(*groups.shape[:3], points.shape[1])
    members = torch.ones(len(centers), dtype=torch.bool) if active is None else torch.from_numpy(active)
    for group, chosen in enumerate(members.view(len(points), -1)):
        if chosen.any():
            rows = groups[group, chosen].flatten(0, 1)
            out = rows.new_empty(len(rows), points.shape[1])
            torch.mm(points[group], rows.mT, out=out.mT)
            products[group, chosen] = out.view(-1, *products.shape[2:])
    return products.flatten(0, 1)
