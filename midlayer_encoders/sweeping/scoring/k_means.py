"""scikit-learn's mini-batch k-means for many layers and draws at once, with the same random numbers."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Ints: TypeAlias = npt.NDArray[np.int64]
_Flags: TypeAlias = npt.NDArray[np.bool_]

# Defaults of scikit-learn's MiniBatchKMeans.
_MAX_ITERATIONS = 100
_PATIENCE = 10
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
    return _KMeans(vectors, drawn.to(vectors.device), clusters, batch_size, seed).run()


@dataclass
class _Stream:
    """A generator and the problems that use it, numbered ``layer * R + draw``."""

    generator: np.random.RandomState
    members: _Ints


class _KMeans:
    """P = L R problems; tensors have the shape ``(L, R, …)``, arrays on the host ``(P,)``."""

    def __init__(self, vectors: Tensor, drawn: Tensor, clusters: int, batch_size: int, seed: int) -> None:
        self.vectors = vectors
        self.drawn = drawn
        self.clusters = clusters
        self.shape = len(vectors), len(drawn)
        self.count = len(vectors) * len(drawn)
        self.size = drawn.shape[1]
        self.batch = min(batch_size, self.size)
        least = 3 * self.batch if 3 * self.batch >= clusters else 3 * clusters
        self.init_size = min(least, self.size)
        self.generator = np.random.RandomState(seed)

    def run(self) -> Tensor:
        """Return the cluster of each row, shape ``(L, R, S)``."""
        self.generator.randint(0, self.size, self.init_size)  # scikit-learn draws these to compare initializations
        centers = self._steps(self._plus_plus())
        labels = self._nearest(self.vectors[:, None], centers)[0]
        return labels.gather(2, self.drawn.expand(*self.shape, self.size))

    def _points(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors that contain the rows of each draw, ``(L, 1 or R, M, D)``, and the position of each row.

        All vectors are fewer than the rows of each draw if the draws share most of their rows.
        """
        if self.vectors.shape[1] <= 2 * rows.shape[-1]:
            return self.vectors[:, None], rows.expand(*self.shape, rows.shape[-1])
        layers = torch.arange(self.shape[0], device=rows.device)[:, None, None]
        places = torch.arange(rows.shape[-1], device=rows.device)
        return self.vectors[layers, rows], places.expand(*self.shape, rows.shape[-1])

    def _plus_plus(self) -> Tensor:
        """Return the initial centers of greedy k-means++, ``(L, R, K, D)``."""
        chosen = np.arange(self.size)
        if self.init_size < self.size:
            chosen = self.generator.randint(0, self.size, self.init_size)
        rows = self.drawn[:, torch.from_numpy(chosen).to(self.drawn.device)]
        points, places = self._points(rows)
        points = points.double()  # as in scikit-learn, which rounds the distances afterwards
        norms = points.square().sum(dim=3)
        weights = self._shares(self.init_size)
        first = int(self.generator.choice(self.init_size, p=weights))
        trials = 2 + int(np.log(self.clusters))
        centers = [places[:, :, first]]
        closest = self._distances(points, norms, places, centers[0][..., None])[..., 0, :]
        for _ in range(1, self.clusters):
            candidates = self._candidates(closest, self.generator.uniform(size=trials))
            positions = places.gather(2, candidates)
            distances = torch.minimum(closest[..., None, :], self._distances(points, norms, places, positions))
            best = distances.sum(dim=3).argmin(dim=2, keepdim=True)
            closest = distances.gather(2, best[..., None].expand(-1, -1, 1, distances.shape[3]))[..., 0, :]
            centers.append(positions.gather(2, best)[..., 0])
        return self._at(points, torch.stack(centers, dim=2)).to(self.vectors.dtype)

    def _shares(self, count: int) -> npt.NDArray[Any]:
        """Return equal probabilities, rounded like scikit-learn's."""
        ones = np.ones(count, dtype=np.float32 if self.vectors.dtype == torch.float32 else np.float64)
        return np.asarray(ones / ones.sum())

    def _candidates(self, closest: Tensor, uniform: npt.NDArray[np.float64]) -> Tensor:
        """Return rows drawn with probabilities proportional to their distance, ``(L, R, T)``."""
        # Cumulative float32 sums on the host, as in scikit-learn: a sum in another order may draw another row and so
        # change the clusters.
        rows = closest.flatten(0, 1).cpu().numpy()
        sums, totals = np.cumsum(rows, axis=1), rows @ np.ones(rows.shape[1], dtype=rows.dtype)
        drawn = [np.searchsorted(row, uniform * total) for row, total in zip(sums, totals, strict=True)]
        places = np.minimum(np.stack(drawn), sums.shape[1] - 1)
        return torch.from_numpy(places).to(closest.device).view(*self.shape, -1)

    def _at(self, points: Tensor, places: Tensor) -> Tensor:
        """Return the vectors at places ``(L, R, T)`` of points."""
        layers = torch.arange(self.shape[0], device=places.device)[:, None, None]
        draws = torch.arange(points.shape[1], device=places.device)[None, :, None]
        vectors: Tensor = points[layers, draws, places]
        return vectors

    def _distances(self, points: Tensor, norms: Tensor, places: Tensor, positions: Tensor) -> Tensor:
        """Return squared distances from the points at T positions to all rows, ``(L, R, T, I)``."""
        candidates = self._at(points, positions)
        products = _products(points, candidates)
        squared = candidates.square().sum(dim=3)[..., None] - 2 * products + norms[..., None, :]
        squared = squared.clamp(min=0).to(self.vectors.dtype)
        return squared.gather(3, places[:, :, None].expand(-1, -1, positions.shape[2], -1))

    def _nearest(self, points: Tensor, centers: Tensor, active: _Flags | None = None) -> tuple[Tensor, Tensor]:
        """Return each point's nearest center and its squared distance minus the point's squared norm, ``(L, R, M)``."""
        distances = centers.square().sum(dim=3)[..., None] - 2 * _products(points, centers, active)
        least = distances.min(dim=2)
        return least.indices, least.values

    def _steps(self, centers: Tensor) -> Tensor:
        """Return the final centers."""
        stopping = _Stopping(self.count, self.batch, self.size)
        streams = [_Stream(self.generator, np.arange(self.count))]
        counts = centers.new_zeros(centers.shape[:3])
        held: npt.NDArray[Any] = np.zeros((self.count, self.clusters))  # the counts on the host
        since = np.zeros(self.count, dtype=np.int64)
        weights = self._shares(self.size)
        places = np.zeros((self.count, self.batch), dtype=np.int64)
        for _ in range(_MAX_ITERATIONS * self.size // self.batch):
            for stream in streams:
                places[stream.members] = stream.generator.choice(self.size, self.batch, p=weights, replace=True)
            since += self.batch
            due = (held == 0).any(axis=1) | (since >= 10 * self.clusters)
            since[due] = 0
            batch = torch.from_numpy(places).to(self.drawn.device).view(*self.shape, -1)
            rows = self.drawn.expand(self.shape[0], *self.drawn.shape).gather(2, batch)
            moved, counted, inertia = self._step(rows, centers, counts, stopping.active.reshape(self.shape))
            going = torch.from_numpy(stopping.active).to(centers.device).view(self.shape)
            centers = torch.where(going[..., None, None], moved, centers)
            counts = torch.where(going[..., None], counted, counts)
            on_host = torch.cat([counts, inertia[..., None]], dim=2).flatten(0, 1).cpu().numpy()
            held = on_host[:, :-1].copy()
            streams = self._reassign(centers, counts, held, rows, streams, due & stopping.active)
            stopping.update(on_host[:, -1].astype(np.float64))
            if not stopping.active.any():
                break
            for stream in streams:
                stream.members = stream.members[stopping.active[stream.members]]
            streams = [stream for stream in streams if len(stream.members)]
        return centers

    def _step(self, rows: Tensor, centers: Tensor, counts: Tensor, active: _Flags) -> tuple[Tensor, Tensor, Tensor]:
        """Return the centers and counts after a batch of rows ``(L, R, B)``, and its inertia with the old centers.

        Results of problems that are not ``active`` are undefined.
        """
        points, places = self._points(rows)
        labels, least = self._nearest(points, centers, active)
        squared = (least + points.square().sum(dim=3)).clamp(min=0)
        inertia = squared.gather(2, places).sum(dim=2)
        new = labels.gather(2, places) * points.shape[2] + places
        times = centers.new_zeros(*self.shape, self.clusters * points.shape[2])
        # The multiplicity of each point in each cluster.
        times.scatter_add_(2, new, torch.ones_like(new, dtype=times.dtype))
        times = times.view(*self.shape, self.clusters, -1)
        more = times.sum(dim=3)
        sums = _products(points.mT, times, active)
        total = counts + more
        moved = (centers * counts[..., None] + sums) / total.clamp(min=1)[..., None]
        return torch.where((more > 0)[..., None], moved, centers), total, inertia

    def _reassign(
        self, centers: Tensor, counts: Tensor, held: npt.NDArray[Any], rows: Tensor, streams: list[_Stream], due: _Flags
    ) -> list[_Stream]:
        """Move centers with few rows to rows of the batch, in place, and return the streams of the next step."""
        low = (held < _REASSIGNMENT_RATIO * held.max(axis=1, keepdims=True)) & due[:, None]
        split: list[_Stream] = []
        for stream in streams:
            moves = low[stream.members].any(axis=1)
            stay, move = stream.members[~moves], stream.members[moves]
            if len(stay):
                split.append(_Stream(stream.generator, stay))
            if not len(move):
                continue
            generator = _copied(stream.generator) if len(stay) else stream.generator
            order = generator.permutation(self.batch)  # `choice` without replacement takes its first entries
            split.append(_Stream(generator, move))
            for problem in move.tolist():
                small = low[problem]
                if small.sum() > 0.5 * self.batch:
                    small[np.argsort(held[problem])[int(0.5 * self.batch) :]] = False
                layer, draw = divmod(problem, self.shape[1])
                clusters = torch.from_numpy(np.flatnonzero(small)).to(rows.device)
                chosen = torch.from_numpy(order[: len(clusters)]).to(rows.device)
                centers[layer, draw, clusters] = self.vectors[layer, rows[layer, draw, chosen]]
                held[problem, small] = held[problem, ~small].min()
                counts[layer, draw] = torch.from_numpy(held[problem]).to(counts.device)
        return split


def _products(points: Tensor, centers: Tensor, active: _Flags | None = None) -> Tensor:
    """Return the products of centers ``(L, R, K, D)`` with points ``(L, 1 or R, M, D)``, shape ``(L, R, K, M)``.

    The points are on the left because some CPU libraries are ten times slower otherwise. A CPU computes one product at
    a time and leaves zeros for problems that are not ``active``; a GPU computes all at once.
    """
    layers, draws = centers.shape[:2]
    if points.device.type != "cpu":
        if points.shape[1] > 1:
            return (points @ centers.mT).mT
        return (points[:, 0] @ centers.flatten(1, 2).mT).mT.unflatten(1, centers.shape[1:3])  # type: ignore[no-untyped-call, no-any-return]
    products = centers.new_zeros(*centers.shape[:3], points.shape[2])
    for layer in range(layers):
        active_draws = np.arange(draws) if active is None else np.flatnonzero(active[layer])
        if not len(active_draws):
            continue
        # All draws at once if they share their points, else one at a time.
        for group in [active_draws] if points.shape[1] == 1 else active_draws[:, None]:
            rows = centers[layer, torch.from_numpy(group)].flatten(0, 1)
            out = rows.new_empty(len(rows), points.shape[2])
            torch.mm(points[layer, group[0] if points.shape[1] > 1 else 0], rows.mT, out=out.mT)
            products[layer, torch.from_numpy(group)] = out.view(len(group), *products.shape[2:])
    return products


def _copied(generator: np.random.RandomState) -> np.random.RandomState:
    other = np.random.RandomState()
    other.set_state(generator.get_state())
    return other


class _Stopping:
    """Stops problems whose smoothed batch inertia has not decreased for some steps."""

    def __init__(self, count: int, batch: int, size: int) -> None:
        self.active = np.ones(count, dtype=bool)
        self.batch = batch
        self.share = min(2 * batch / (size + 1), 1)
        self.steps = 0
        self.smoothed: npt.NDArray[np.float64] | None = None
        self.least = np.full(count, np.inf)
        self.waited = np.zeros(count, dtype=np.int64)

    def update(self, inertia: npt.NDArray[np.float64]) -> None:
        """Add the inertia of each problem's batch; the first one belongs to the initial centers and is ignored."""
        self.steps += 1
        if self.steps == 1:
            return
        mean = inertia / self.batch
        self.smoothed = mean if self.smoothed is None else self.smoothed * (1 - self.share) + mean * self.share
        better = self.smoothed < self.least
        self.least = np.where(better, self.smoothed, self.least)
        self.waited = np.where(better, 0, self.waited + 1)
        self.active &= self.waited < _PATIENCE
