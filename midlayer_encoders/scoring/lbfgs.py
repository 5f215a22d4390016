"""L-BFGS for many problems side by side, each on the path that SciPy's L-BFGS-B without bounds takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from midlayer_encoders.scoring.line_search import LineSearch

Floats: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.int64]

_PAIRS = 10  # steps and changes of gradient that are remembered, SciPy's default
_IDLE = 0.125  # part of the problems that may be done before the memory of the others is copied
_EPS = float(np.finfo(float).eps)


def lbfgs(
    objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    max_iterations: int,
    gradient_tolerance: float,
    value_tolerance: float = 64 * _EPS,
    max_trials: int = 50,
    largest: Callable[[Tensor, Tensor], Tensor] = lambda _, gradients: gradients.abs().amax(dim=1),
) -> Tensor:
    """Return the minimizers of P functions, shape ``(P, K)``.

    Directions are linear combinations of remembered steps, changes and the gradient, so all that the recursion needs
    are their inner products: two passes over the memory an iteration, and small matrices on the host (Chen, Wang and
    Zhou, 2014, "Large-scale L-BFGS using MapReduce").

    Args:
        objective: from places of problems ``(A,)`` and their points ``(A, K)`` to values ``(A,)`` and gradients.
        start: where each problem begins, shape ``(P, K)``, float64.
        max_iterations: of each problem.
        gradient_tolerance: a problem is done when no entry of its gradient is larger.
        value_tolerance: or when the value decreases by less than this part of it.
        max_trials: of a line search.
        largest: from places and gradients to what is compared with ``gradient_tolerance``.
    """
    return _Run(objective, start, max_iterations, gradient_tolerance, value_tolerance, max_trials, largest).run()


class _Run:
    """The problems that are not done yet; row ``a`` of every array here is problem ``places[a]``."""

    def __init__(
        self,
        objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        start: Tensor,
        max_iterations: int,
        gradient_tolerance: float,
        value_tolerance: float,
        max_trials: int,
        largest: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.objective, self.max_iterations, self.max_trials = objective, max_iterations, max_trials
        self.gradient_tolerance, self.value_tolerance, self.largest = gradient_tolerance, value_tolerance, largest
        count = len(start)
        self.found = start.clone()
        self.places = torch.arange(count, device=start.device)
        self.point = start.clone()
        values, self.gradient = objective(self.places, self.point)
        self.value = _host(values)
        # Rows 0 to 9 are steps, 10 to 19 the changes of the gradient over them, 20 the gradient itself.
        self.memory = start.new_zeros(count, 2 * _PAIRS + 1, start.shape[1])
        self.memory[:, -1] = self.gradient
        self.products = np.zeros((count, 2 * _PAIRS + 1, 2 * _PAIRS + 1))
        self.products[:, -1, -1] = _host(self.gradient.square().sum(dim=1))
        self.stored = np.zeros(count, dtype=np.int64)  # pairs since the memory was last emptied
        self.iterations = np.zeros(count, dtype=np.int64)
        self.trials = np.zeros(count, dtype=np.int64)
        self.idle = np.zeros(count, dtype=bool)  # done, and not left out yet
        self.direction = torch.zeros_like(start)
        self.search = LineSearch.start(np.ones(count), self.value, -np.ones(count))

    def run(self) -> Tensor:
        """Return the minimizers."""
        flat = _host(self.largest(self.places, self.gradient)) <= self.gradient_tolerance
        self._leave(flat)
        self._turn(~self.idle)
        while len(self.places):
            trial = self.point + self._column(self.search.step) * self.direction
            values, gradients = self.objective(self.places, trial)
            slopes = (gradients * self.direction).sum(dim=1)
            value, slope = _host(torch.stack([values, slopes]))
            self.trials += 1
            slope_before, step = self.search.g_start.copy(), self.search.step.copy()
            over = self.search.advance(value, slope)
            # As in L-BFGS-B: a search that finds nothing starts again along the gradient, unless that is where it was.
            lost = ~over & (self.trials >= self.max_trials)
            lost |= ~np.isfinite(value)
            lost &= ~self.idle
            over &= ~lost & ~self.idle
            done = lost & (self.stored == 0)
            if over.any():
                done |= self._accept(over, trial, value, gradients, step * (slope - slope_before), step, slope_before)
            self.stored[lost] = 0
            self._turn((over | lost) & ~done)
            self._leave(done)
        return self.found

    def _accept(
        self,
        over: npt.NDArray[np.bool_],
        trial: Tensor,
        value: Floats,
        gradients: Tensor,
        curvature: Floats,
        step: Floats,
        slope: Floats,
    ) -> npt.NDArray[np.bool_]:
        """Move the problems whose search is over to the point that it found, and return which of them are done."""
        before = self.value
        rows = torch.from_numpy(np.flatnonzero(over)).to(self.point.device)
        slots = self.stored[over] % _PAIRS
        kept = curvature[over] > _EPS * -slope[over] * step[over]  # a step along which the slope falls says nothing
        one, two = self.memory[rows, -1], gradients[rows]
        slot = torch.from_numpy(slots).to(rows.device)
        keep = torch.from_numpy(kept).to(rows.device)
        self.memory[rows[keep], slot[keep]] = (trial[rows] - self.point[rows])[keep]
        self.memory[rows[keep], slot[keep] + _PAIRS] = (two - one)[keep]
        self.memory[rows, -1] = two
        self.point[rows], self.gradient[rows] = trial[rows], two
        self.value = np.where(over, value, before)
        self.iterations[over] += 1
        self._products(np.flatnonzero(over), slots, kept)
        self.stored[over] += kept
        largest = np.zeros(len(over))
        largest[over] = _host(self.largest(self.places[rows], two))
        scale = np.maximum(np.maximum(np.abs(before), np.abs(value)), 1)
        done = (largest <= self.gradient_tolerance) | (before - value <= self.value_tolerance * scale)
        return over & (done | (self.iterations >= self.max_iterations))

    def _products(self, places: Places, slots: Places, kept: npt.NDArray[np.bool_]) -> None:
        """Renew the inner products of the last step, the last change and the gradient with everything remembered."""
        slot = torch.from_numpy(self.stored % _PAIRS).to(self.memory.device)
        every = torch.arange(len(slot), device=slot.device)
        newest = torch.stack([self.memory[every, slot], self.memory[every, slot + _PAIRS], self.memory[:, -1]], dim=2)
        found = _host(torch.bmm(self.memory, newest))[places]  # (A, 21, 3)
        for column, entries in enumerate((slots, slots + _PAIRS, np.full_like(slots, 2 * _PAIRS))):
            some = kept | (column == 2)
            self.products[places[some], :, entries[some]] = found[some, :, column]
            self.products[places[some], entries[some]] = found[some, :, column]

    def _turn(self, where: npt.NDArray[np.bool_]) -> None:
        """Begin a line search along a new direction for some problems."""
        if not where.any():
            return
        weights = self._weights()
        slope = -np.einsum("aj,aj->a", weights, self.products[:, -1])
        # Rounding may turn a direction uphill: then the memory is emptied and the gradient taken.
        uphill = where & (slope >= 0) & (self.stored > 0)
        if uphill.any():
            self.stored[uphill] = 0
            weights = self._weights()
            slope = -np.einsum("aj,aj->a", weights, self.products[:, -1])
        direction = -torch.einsum("aj,ajk->ak", torch.from_numpy(weights).to(self.memory), self.memory)
        chosen = torch.from_numpy(where).to(direction.device)[:, None]
        self.direction = torch.where(chosen, direction, self.direction)
        norm = np.sqrt(self.products[:, -1, -1])
        first = (self.iterations == 0) & (norm > 0)
        step = np.where(first, 1 / np.where(first, norm, 1), 1.0)
        self.search.put(where, LineSearch.start(step, self.value, slope))
        self.trials[where] = 0

    def _weights(self) -> Floats:
        """Return the weights of the memory's rows in the inverse Hessian times the gradient, shape ``(A, 21)``."""
        products, every = self.products, np.arange(len(self.places))
        weights = np.zeros(products.shape[:2])
        weights[:, -1] = 1
        alphas = np.zeros((len(every), _PAIRS))
        newest = (self.stored - 1) % _PAIRS
        for age in range(_PAIRS):
            slot, known = (newest - age) % _PAIRS, age < np.minimum(self.stored, _PAIRS)
            curvature = np.where(known, products[every, slot, slot + _PAIRS], 1)
            alpha = np.where(known, np.einsum("aj,aj->a", weights, products[every, slot]) / curvature, 0)
            weights[every, slot + _PAIRS] -= alpha
            alphas[:, age] = alpha
        known = self.stored > 0
        squared = np.where(known, products[every, newest + _PAIRS, newest + _PAIRS], 1)
        weights *= np.where(known, products[every, newest, newest + _PAIRS] / squared, 1)[:, None]
        for age in reversed(range(_PAIRS)):
            slot, known = (newest - age) % _PAIRS, age < np.minimum(self.stored, _PAIRS)
            curvature = np.where(known, products[every, slot, slot + _PAIRS], 1)
            beta = np.where(known, np.einsum("aj,aj->a", weights, products[every, slot + _PAIRS]) / curvature, 0)
            weights[every, slot] += np.where(known, alphas[:, age] - beta, 0)
        return weights

    def _leave(self, done: npt.NDArray[np.bool_]) -> None:
        """Note the points of problems that are done, and go on without them once they are many."""
        if not done.any():
            return
        leaving = torch.from_numpy(done).to(self.point.device)
        self.found[self.places[leaving]] = self.point[leaving]
        self.idle |= done
        if self.idle.mean() < _IDLE and not self.idle.all():
            return
        rest = np.flatnonzero(~self.idle)
        kept = torch.from_numpy(~self.idle).to(self.point.device)
        self.idle = self.idle[rest]
        self.places, self.point, self.gradient = self.places[kept], self.point[kept], self.gradient[kept]
        self.memory, self.direction = self.memory[kept], self.direction[kept]
        self.value, self.products, self.stored = self.value[rest], self.products[rest], self.stored[rest]
        self.iterations, self.trials, self.search = self.iterations[rest], self.trials[rest], self.search.kept(rest)

    def _column(self, values: Floats) -> Tensor:
        return torch.from_numpy(values).to(self.point)[:, None]


def _host(values: Tensor) -> Floats:
    return np.asarray(values.double().cpu().numpy())
