"""Mini-batch k-means of many layers and draws side by side: scikit-learn's, with its own random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints: TypeAlias = npt.NDArray[np.int64]

_MAX_ITERATIONS, _PATIENCE, _SMALL = 100, 10, 0.01  # defaults of scikit-learn's MiniBatchKMeans


def mini_batch_k_means(vectors: Tensor, drawn: Tensor, *, clusters: int, batch_size: int, seed: int) -> Tensor:
    """Return the cluster of every row of every draw, shape ``(L, R, S)``.

    ``MiniBatchKMeans(clusters, batch_size=batch_size, n_init=1, random_state=seed)`` of scikit-learn, fitted to each
    draw at each layer. Its random numbers do not depend on the vectors but for one thing, whether centers with few
    rows are moved at a step, so those of all layers and draws are taken from a few generators.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``, float32.
        drawn: places of the S rows of each of R draws, shape ``(R, S)``.
        clusters: number of them.
        batch_size: rows of a step.
        seed: scikit-learn's ``random_state``.
    """
    # Clusters do not move with the origin, and distances between vectors of small norm lose fewer digits.
    vectors = vectors - vectors.double().mean(dim=1, keepdim=True).to(vectors.dtype)
    return _Run(vectors, drawn.to(vectors.device), clusters, batch_size, seed).run()


@dataclass
class _Stream:
    """A generator and the problems, as ``layer * R + draw``, whose numbers come from it."""

    generator: np.random.RandomState
    members: Ints


class _Run:
    """P = L R problems; shapes ``(L, R, …)`` on the device, ``(P,)`` on the host."""

    def __init__(self, vectors: Tensor, drawn: Tensor, clusters: int, batch_size: int, seed: int) -> None:
        self.vectors, self.drawn, self.clusters = vectors, drawn, clusters
        self.shape = len(vectors), len(drawn)
        self.count, self.size = len(vectors) * len(drawn), drawn.shape[1]
        self.batch = min(batch_size, self.size)
        least = 3 * self.batch if 3 * self.batch >= clusters else 3 * clusters
        self.init_size = min(least, self.size)
        self.generator = np.random.RandomState(seed)

    def run(self) -> Tensor:
        """Return every row's cluster."""
        self.generator.randint(0, self.size, self.init_size)  # drawn to compare several starts, of which there is one
        centers = self._steps(self._plus_plus())
        labels = self._nearest(self.vectors[:, None], centers)[0]
        return labels.gather(2, self.drawn.expand(*self.shape, self.size))

    def _points(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors to look at for some rows of each draw, ``(L, 1 or R, M, D)``, and each row's place there.

        Where the draws have few distinct rows, distances to all of them are fewer than to each row of each draw.
        """
        if self.vectors.shape[1] <= 2 * rows.shape[-1]:
            return self.vectors[:, None], rows.expand(*self.shape, rows.shape[-1])
        layers = torch.arange(self.shape[0], device=rows.device)[:, None, None]
        places = torch.arange(rows.shape[-1], device=rows.device)
        return self.vectors[layers, rows], places.expand(*self.shape, rows.shape[-1])

    def _plus_plus(self) -> Tensor:
        """Return the first centers, ``(L, R, K, D)``: greedy k-means++."""
        chosen = np.arange(self.size)
        if self.init_size < self.size:
            chosen = self.generator.randint(0, self.size, self.init_size)
        rows = self.drawn[:, torch.from_numpy(chosen).to(self.drawn.device)]
        points, places = self._points(rows)
        points = points.double()  # as scikit-learn does here, and then rounds to the vectors' own precision
        norms = points.square().sum(dim=3)
        weights = self._shares(self.init_size)
        first = int(self.generator.choice(self.init_size, p=weights))
        trials = 2 + int(np.log(self.clusters))
        found = [places[:, :, first]]
        closest = self._distances(points, norms, places, found[0][..., None])[..., 0, :]
        for _ in range(1, self.clusters):
            candidates = self._candidates(closest, self.generator.uniform(size=trials))
            asked = places.gather(2, candidates)
            distances = torch.minimum(closest[..., None, :], self._distances(points, norms, places, asked))
            best = distances.sum(dim=3).argmin(dim=2, keepdim=True)
            closest = distances.gather(2, best[..., None].expand(-1, -1, 1, distances.shape[3]))[..., 0, :]
            found.append(asked.gather(2, best)[..., 0])
        return self._at(points, torch.stack(found, dim=2)).to(self.vectors.dtype)

    def _shares(self, count: int) -> npt.NDArray[Any]:
        """Return equal chances, rounded as scikit-learn has them."""
        ones = np.ones(count, dtype=np.float32 if self.vectors.dtype == torch.float32 else np.float64)
        return np.asarray(ones / ones.sum())

    def _candidates(self, closest: Tensor, uniform: npt.NDArray[np.float64]) -> Tensor:
        """Return rows drawn by their distance to the nearest center, ``(L, R, T)``."""
        # Added one after the other in float32, as scikit-learn does, and all on the host: a sum in another order may
        # draw another row, and then a whole draw ends elsewhere.
        rows = closest.flatten(0, 1).cpu().numpy()
        sums, totals = np.cumsum(rows, axis=1), rows @ np.ones(rows.shape[1], dtype=rows.dtype)
        drawn = [np.searchsorted(row, uniform * total) for row, total in zip(sums, totals, strict=True)]
        places = np.minimum(np.stack(drawn), sums.shape[1] - 1)
        return torch.from_numpy(places).to(closest.device).view(*self.shape, -1)

    def _at(self, points: Tensor, places: Tensor) -> Tensor:
        """Return the vectors at places ``(L, R, T)`` of points."""
        layers = torch.arange(self.shape[0], device=places.device)[:, None, None]
        draws = torch.arange(points.shape[1], device=places.device)[None, :, None]
        found: Tensor = points[layers, draws, places]
        return found

    def _distances(self, points: Tensor, norms: Tensor, places: Tensor, asked: Tensor) -> Tensor:
        """Return squared distances from asked points to all rows, ``(L, R, T, I)``."""
        of = self._at(points, asked)
        products = _products(points, of)
        squared = of.square().sum(dim=3)[..., None] - 2 * products + norms[..., None, :]
        squared = squared.clamp(min=0).to(self.vectors.dtype)
        return squared.gather(3, places[:, :, None].expand(-1, -1, asked.shape[2], -1))

    def _nearest(
        self, points: Tensor, centers: Tensor, active: npt.NDArray[np.bool_] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the nearest center of each point and its squared distance less the point's norm, ``(L, R, M)``."""
        distances = centers.square().sum(dim=3)[..., None] - 2 * _products(points, centers, active)
        least = distances.min(dim=2)
        return least.indices, least.values

    def _steps(self, centers: Tensor) -> Tensor:
        """Return the centers after all steps."""
        stopping = _Stopping(self.count, self.batch, self.size)
        streams = [_Stream(self.generator, np.arange(self.count))]
        counts = centers.new_zeros(centers.shape[:3])
        held: npt.NDArray[Any] = np.zeros((self.count, self.clusters))  # the counts, on the host
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
            noted = torch.cat([counts, inertia[..., None]], dim=2).flatten(0, 1).cpu().numpy()
            held = noted[:, :-1].copy()
            streams = self._reassign(centers, counts, held, rows, streams, due & stopping.active)
            stopping.note(noted[:, -1].astype(np.float64))
            if not stopping.active.any():
                break
            left = (_Stream(one.generator, one.members[stopping.active[one.members]]) for one in streams)
            streams = [one for one in left if len(one.members)]
        return centers

    def _step(
        self, rows: Tensor, centers: Tensor, counts: Tensor, active: npt.NDArray[np.bool_]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the centers and counts after a batch of rows ``(L, R, B)``, and the batch's inertia before it.

        What is returned for problems that are not ``active`` says nothing.
        """
        points, places = self._points(rows)
        labels, least = self._nearest(points, centers, active)
        squared = (least + points.square().sum(dim=3)).clamp(min=0)
        inertia = squared.gather(2, places).sum(dim=2)
        new = labels.gather(2, places) * points.shape[2] + places
        times = centers.new_zeros(*self.shape, self.clusters * points.shape[2])
        times.scatter_add_(2, new, torch.ones_like(new, dtype=times.dtype))  # how often a point counts for a cluster
        times = times.view(*self.shape, self.clusters, -1)
        more = times.sum(dim=3)
        sums = _products(points.mT, times, active)
        total = counts + more
        moved = (centers * counts[..., None] + sums) / total.clamp(min=1)[..., None]
        return torch.where((more > 0)[..., None], moved, centers), total, inertia

    def _reassign(
        self,
        centers: Tensor,
        counts: Tensor,
        held: npt.NDArray[Any],
        rows: Tensor,
        streams: list[_Stream],
        due: npt.NDArray[np.bool_],
    ) -> list[_Stream]:
        """Move centers with few rows to rows of the batch, in place, and return the streams of the next step."""
        low = (held < _SMALL * held.max(axis=1, keepdims=True)) & due[:, None]
        split: list[_Stream] = []
        for stream in streams:
            some = low[stream.members].any(axis=1)
            stay, move = stream.members[~some], stream.members[some]
            if len(stay):
                split.append(_Stream(stream.generator, stay))
            if not len(move):
                continue
            generator = _copied(stream.generator) if len(stay) else stream.generator
            order = generator.permutation(self.batch)  # what a choice without replacement takes the first of
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


def _products(points: Tensor, others: Tensor, active: npt.NDArray[np.bool_] | None = None) -> Tensor:
    """Return the products of others ``(L, R, K, D)`` with points ``(L, 1 or R, M, D)``, shape ``(L, R, K, M)``.

    The points stand on the left: the other way round some CPU libraries are ten times slower. A CPU takes one product
    after the other, and zero where a problem is not ``active``; a GPU takes all at once.
    """
    layers, draws = others.shape[:2]
    if points.device.type != "cpu":
        if points.shape[1] > 1:
            return (points @ others.mT).mT
        return (points[:, 0] @ others.flatten(1, 2).mT).mT.unflatten(1, others.shape[1:3])  # type: ignore[no-untyped-call, no-any-return]
    found = others.new_zeros(*others.shape[:3], points.shape[2])
    for layer in range(layers):
        wanted = np.arange(draws) if active is None else np.flatnonzero(active[layer])
        if not len(wanted):
            continue
        for some in [wanted] if points.shape[1] == 1 else wanted[:, None]:  # draws that share their points, or one
            rows = others[layer, torch.from_numpy(some)].flatten(0, 1)
            out = rows.new_empty(len(rows), points.shape[2])
            torch.mm(points[layer, some[0] if points.shape[1] > 1 else 0], rows.mT, out=out.mT)
            found[layer, torch.from_numpy(some)] = out.view(len(some), *found.shape[2:])
    return found


def _copied(generator: np.random.RandomState) -> np.random.RandomState:
    other = np.random.RandomState()
    other.set_state(generator.get_state())
    return other


class _Stopping:
    """Which problems go on: until the smoothed inertia of the batches has not decreased for some steps."""

    def __init__(self, count: int, batch: int, size: int) -> None:
        self.active = np.ones(count, dtype=bool)
        self.batch, self.share = batch, min(2 * batch / (size + 1), 1)
        self.steps = 0
        self.smoothed: npt.NDArray[np.float64] | None = None
        self.least = np.full(count, np.inf)
        self.waited = np.zeros(count, dtype=np.int64)

    def note(self, inertia: npt.NDArray[np.float64]) -> None:
        """Take the inertia of each problem's batch; the first is that of the start, and is ignored."""
        self.steps += 1
        if self.steps == 1:
            return
        mean = inertia / self.batch
        self.smoothed = mean if self.smoothed is None else self.smoothed * (1 - self.share) + mean * self.share
        better = self.smoothed < self.least
        self.least = np.where(better, self.smoothed, self.least)
        self.waited = np.where(better, 0, self.waited + 1)
        self.active &= self.waited < _PATIENCE
