"""L-BFGS for many problems at once; each follows the path of SciPy's L-BFGS-B without bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize._dcsrch import DCSRCH
from torch import Tensor

_Floats: TypeAlias = npt.NDArray[np.float64]
_Flags: TypeAlias = npt.NDArray[np.bool_]

_PAIRS = 10  # remembered steps and gradient changes, SciPy's default
_EPS = float(np.finfo(float).eps)
_VALUE_TOLERANCE = 64 * _EPS  # scikit-learn's
_MAX_TRIALS = 50  # of a line search, scikit-learn's
_IDLE = 0.125  # share of finished problems at which the others are copied


def lbfgs(
    objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    max_iterations: int,
    gradient_tolerance: float,
    largest: Callable[[Tensor, Tensor], Tensor] = lambda _, gradients: gradients.abs().amax(dim=1),
) -> Tensor:
    """Return the minimizers of P functions, shape ``(P, K)``.

    Directions are linear combinations of remembered steps, gradient changes and the gradient, so the recursion needs
    only their inner products: two passes over the memory per iteration, and small matrices on the host (Chen, Wang and
    Zhou, 2014, "Large-scale L-BFGS using MapReduce").

    Args:
        objective: maps problem numbers ``(A,)`` and their points ``(A, K)`` to values ``(A,)`` and gradients.
        start: initial point of each problem, shape ``(P, K)``, float64.
        max_iterations: largest number of iterations of each problem.
        gradient_tolerance: a problem is finished when no entry of its gradient is larger, or its value decreases by
            no more than rounding.
        largest: maps problem numbers and gradients to the numbers that are compared with ``gradient_tolerance``.
    """
    return _Minimization(objective, start, max_iterations, gradient_tolerance, largest).run()


class _Minimization:
    """The unfinished problems; row ``a`` of every array belongs to problem ``problems[a]``."""

    def __init__(
        self,
        objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        start: Tensor,
        max_iterations: int,
        gradient_tolerance: float,
        largest: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self.objective = objective
        self.max_iterations = max_iterations
        self.gradient_tolerance = gradient_tolerance
        self.largest = largest
        count = len(start)
        self.minimizers = start.clone()
        self.problems = torch.arange(count, device=start.device)
        self.point = start.clone()
        values, gradient = objective(self.problems, self.point)
        self.value = _host(values)
        # Rows 0 to 9 are steps, 10 to 19 the gradient changes over them, 20 the gradient.
        self.memory = start.new_zeros(count, 2 * _PAIRS + 1, start.shape[1])
        self.memory[:, -1] = gradient
        self.products = np.zeros((count, 2 * _PAIRS + 1, 2 * _PAIRS + 1))
        self.products[:, -1, -1] = _host(gradient.square().sum(dim=1))
        self.num_pairs = np.zeros(count, dtype=np.int64)  # since the memory was last cleared
        self.iterations = np.zeros(count, dtype=np.int64)
        self.idle = np.zeros(count, dtype=bool)  # finished, but not yet removed
        self.direction = torch.zeros_like(start)
        self.searches: npt.NDArray[Any] = np.empty(count, dtype=object)  # one line search per problem
        self.trials = np.zeros(count, dtype=np.int64)
        self.step = np.ones(count)
        self.start_slope = np.zeros(count)

    def run(self) -> Tensor:
        """Return the minimizers."""
        self._finish(_host(self.largest(self.problems, self.memory[:, -1])) <= self.gradient_tolerance)
        self._start_searches(~self.idle)
        while len(self.problems):
            trial = self.point + torch.from_numpy(self.step).to(self.point)[:, None] * self.direction
            values, gradients = self.objective(self.problems, trial)
            value, slope = _host(torch.stack([values, (gradients * self.direction).sum(dim=1)]))
            step = self.step.copy()
            accepted = self._search(value, slope)
            # As in L-BFGS-B: a failed search starts again along the gradient, unless that was its direction.
            failed = ~accepted & ~self.idle & ((self.trials >= _MAX_TRIALS) | ~np.isfinite(value))
            finished = failed & (self.num_pairs == 0)
            if accepted.any():
                finished |= self._accept(accepted, trial, value, gradients, step * (slope - self.start_slope))
            self.num_pairs[failed] = 0
            self._start_searches((accepted | failed) & ~finished)
            self._finish(finished)
        return self.minimizers

    def _search(self, value: _Floats, slope: _Floats) -> _Flags:
        """Advance the line searches, set the next steps, and return which searches accept their step."""
        self.trials += 1
        accepted = np.zeros(len(value), dtype=bool)
        with np.errstate(all="ignore"):
            for row in np.flatnonzero(np.isfinite(value) & ~self.idle):
                self.step[row], _, _, task = self.searches[row]._iterate(self.step[row], value[row], slope[row], b"FG")
                accepted[row] = task != b"FG"
        return accepted

    def _accept(self, accepted: _Flags, trial: Tensor, value: _Floats, gradients: Tensor, curvature: _Floats) -> _Flags:
        """Move problems to their accepted points, and return which of them are finished."""
        previous = self.value
        rows = torch.from_numpy(np.flatnonzero(accepted)).to(self.point.device)
        slots = self.num_pairs[accepted] % _PAIRS
        # A step along which the slope decreases carries no information.
        useful = curvature[accepted] > _EPS * -self.start_slope[accepted] * self.step[accepted]
        slot = torch.from_numpy(slots).to(rows.device)[torch.from_numpy(useful).to(rows.device)]
        useful_rows = rows[torch.from_numpy(useful).to(rows.device)]
        self.memory[useful_rows, slot] = trial[useful_rows] - self.point[useful_rows]
        self.memory[useful_rows, slot + _PAIRS] = gradients[useful_rows] - self.memory[useful_rows, -1]
        self.memory[rows, -1] = gradients[rows]
        self.point[rows] = trial[rows]
        self.value = np.where(accepted, value, previous)
        self.iterations[accepted] += 1
        self._update_products(np.flatnonzero(accepted), slots, useful)
        self.num_pairs[accepted] += useful
        largest = np.zeros(len(accepted))
        largest[accepted] = _host(self.largest(self.problems[rows], gradients[rows]))
        scale = np.maximum(np.maximum(np.abs(previous), np.abs(value)), 1)
        converged = (largest <= self.gradient_tolerance) | (previous - value <= _VALUE_TOLERANCE * scale)
        return accepted & (converged | (self.iterations >= self.max_iterations))

    def _update_products(self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], useful: _Flags) -> None:
        """Update the inner products of the last step, the last gradient change and the gradient with the memory."""
        slot = torch.from_numpy(self.num_pairs % _PAIRS).to(self.memory.device)
        all_rows = torch.arange(len(slot), device=slot.device)
        newest = [self.memory[all_rows, slot], self.memory[all_rows, slot + _PAIRS], self.memory[:, -1]]
        products = _host(torch.bmm(self.memory, torch.stack(newest, dim=2)))[rows]  # (A, 21, 3)
        for column, entries in enumerate((slots, slots + _PAIRS, np.full_like(slots, 2 * _PAIRS))):
            changed = useful | (column == 2)
            self.products[rows[changed], :, entries[changed]] = products[changed, :, column]
            self.products[rows[changed], entries[changed]] = products[changed, :, column]

    def _start_searches(self, selected: _Flags) -> None:
        """Start a line search along a new direction for selected problems."""
        if not selected.any():
            return
        weights, slope = self._weights()
        # Rounding may give an ascent direction: then the memory is cleared, which leaves the gradient.
        ascending = selected & (slope >= 0) & (self.num_pairs > 0)
        if ascending.any():
            self.num_pairs[ascending] = 0
            weights, slope = self._weights()
        direction = -torch.einsum("aj,ajk->ak", torch.from_numpy(weights).to(self.memory), self.memory)
        mask = torch.from_numpy(selected).to(direction.device)[:, None]
        self.direction = torch.where(mask, direction, self.direction)
        norm = np.sqrt(self.products[:, -1, -1])
        first = (self.iterations == 0) & (norm > 0)
        step = np.where(first, 1 / np.where(first, norm, 1), 1.0)
        for row in np.flatnonzero(selected):
            search = DCSRCH(None, None, ftol=1e-3, gtol=0.9, xtol=0.1, stpmin=0, stpmax=1e10)  # as L-BFGS-B
            search._iterate(step[row], self.value[row], slope[row], b"START")
            self.searches[row] = search
        self.step[selected] = step[selected]
        self.start_slope[selected] = slope[selected]
        self.trials[selected] = 0

    def _weights(self) -> tuple[_Floats, _Floats]:
        """Return the weights of the memory in the inverse Hessian times the gradient, ``(A, 21)``, and the slopes."""
        products = self.products
        rows = np.arange(len(self.problems))
        weights = np.zeros(products.shape[:2])
        weights[:, -1] = 1
        alphas = np.zeros((len(rows), _PAIRS))
        newest = (self.num_pairs - 1) % _PAIRS
        slots = [(newest - age) % _PAIRS for age in range(_PAIRS)]
        exists = [age < self.num_pairs for age in range(_PAIRS)]
        curvatures = [
            np.where(exist, products[rows, slot, slot + _PAIRS], 1) for slot, exist in zip(slots, exists, strict=True)
        ]
        for age, slot in enumerate(slots):
            projection = np.einsum("aj,aj->a", weights, products[rows, slot])
            alphas[:, age] = np.where(exists[age], projection / curvatures[age], 0)
            weights[rows, slot + _PAIRS] -= alphas[:, age]
        squared = np.where(exists[0], products[rows, newest + _PAIRS, newest + _PAIRS], 1)
        weights *= np.where(exists[0], curvatures[0] / squared, 1)[:, None]
        for age in reversed(range(_PAIRS)):
            projection = np.einsum("aj,aj->a", weights, products[rows, slots[age] + _PAIRS])
            weights[rows, slots[age]] += np.where(exists[age], alphas[:, age] - projection / curvatures[age], 0)
        return weights, -np.einsum("aj,aj->a", weights, products[:, -1])

    def _finish(self, finished: _Flags) -> None:
        """Store the points of finished problems, and remove these once they are many."""
        if not finished.any():
            return
        leaving = torch.from_numpy(finished).to(self.point.device)
        self.minimizers[self.problems[leaving]] = self.point[leaving]
        self.idle |= finished
        if self.idle.mean() < _IDLE and not self.idle.all():
            return
        active = ~self.idle
        for name in ("value", "products", "num_pairs", "iterations", "searches", "trials", "step", "start_slope"):
            setattr(self, name, getattr(self, name)[active])
        remaining = torch.from_numpy(active).to(self.point.device)
        for name in ("problems", "point", "memory", "direction"):
            setattr(self, name, getattr(self, name)[remaining])
        self.idle = self.idle[active]


def _host(values: Tensor) -> _Floats:
    return np.asarray(values.double().cpu().numpy())
