"""Classification: logistic regressions on a few examples of each class, averaged over draws.

All layers and draws are solved at once, by the same L-BFGS steps as in scikit-learn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize._dcsrch import DCSRCH
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, softplus

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.scoring.resampling import resampled_means


def logistic_regressions(
    rows: Tensor, labels: Tensor, *, classes: int, strength: float = 1.0, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    r"""Return the weights ``(P, D, C)`` and biases ``(P, C)`` of P regressions; for two classes only the second's.

    .. math::
        \min_{W, b} \frac1S \sum_s -\log \operatorname{softmax}(W x_s + b)_{y_s} + \frac{1}{2 S\,c} \lVert W \rVert^2

    is scikit-learn's ``LogisticRegression(C=c)``; for two classes it has one weight vector and the sigmoid, which
    changes the penalty. mteb's default of 100 iterations often stops before convergence, so scores depend on the path.
    Iterates are in the span of the rows, and the path does not depend on the basis, so with few rows the regressions
    are solved in a basis of that span. Only scikit-learn's stopping rule, the largest entry of the gradient, depends on
    the basis, and is evaluated in the original one.

    Args:
        rows: shape ``(P, S, D)``.
        labels: from 0 to ``classes - 1``, each present, shape ``(P, S)``.
        classes: number C of classes, at least 2.
        strength: scikit-learn's ``C``.
        max_iterations: scikit-learn's ``max_iter``.
        tolerance: scikit-learn's ``tol``, for the largest entry of the gradient.
    """
    count, size, dim = rows.shape
    rows = rows.double()
    basis: Tensor | None = None
    if 2 * size <= dim:
        rows, basis = _in_span(rows)
    outputs = 1 if classes == 2 else classes
    minimization = Minimization(
        partial(_objective, rows, labels, outputs, 1 / (strength * size)),
        rows.new_zeros(count, (rows.shape[2] + 1) * outputs),
        max_iterations,
        tolerance,
    )
    if basis is not None:
        minimization.largest = partial(_largest_entry, basis, outputs, tolerance)
    points = minimization.run().view(count, -1, outputs)
    weights = points[:, :-1] if basis is None else torch.bmm(basis, points[:, :-1])
    return weights, points[:, -1]


def _in_span(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in an orthonormal basis of their span, ``(P, S, S)``, and that basis, ``(P, D, S)``."""
    values, vectors = torch.linalg.eigh(torch.bmm(rows, rows.mT))
    # Directions below the rounding of the products are noise and get no coordinate.
    large = values > values[:, -1:] * rows.shape[1] * torch.finfo(rows.dtype).eps
    roots = torch.where(large, values, 1).sqrt()
    coordinates = vectors * torch.where(large, roots, 0)[:, None]
    return coordinates, torch.bmm(rows.mT, vectors * torch.where(large, 1 / roots, 0)[:, None])


def _largest_entry(basis: Tensor, outputs: int, tolerance: float, problems: Tensor, gradients: Tensor) -> Tensor:
    """Return the largest entry of gradients in the original basis, or a lower bound of it above the tolerance."""
    gradients = gradients.view(len(gradients), -1, outputs)
    bias = gradients[:, -1].abs().amax(dim=1)
    least = torch.linalg.vector_norm(gradients[:, :-1], dim=1).amax(dim=1) / basis.shape[1] ** 0.5
    near = (torch.maximum(least, bias) <= tolerance).nonzero()[:, 0]
    if len(near):
        least[near] = torch.bmm(basis[problems[near]], gradients[near, :-1]).abs().amax(dim=(1, 2))
    return torch.maximum(least, bias)


def _objective(
    rows: Tensor, labels: Tensor, outputs: int, penalty: float, problems: Tensor, points: Tensor
) -> tuple[Tensor, Tensor]:
    """Return value and gradient of regressions; a point holds one row of weights per dimension, then the biases."""
    if len(problems) != len(rows):
        rows = rows[problems]
        labels = labels[problems]
    size = rows.shape[1]
    points = points.view(len(points), -1, outputs)
    weights = points[:, :-1]
    logits = torch.baddbmm(points[:, -1:], rows, weights)
    if outputs == 1:
        targets = labels[..., None].to(logits)
        losses = softplus(logits) - targets * logits
        residuals = (logits.sigmoid() - targets) / size
    else:
        log_shares = log_softmax(logits, dim=2)
        losses = -log_shares.gather(2, labels[..., None])
        residuals = (log_shares.exp() - one_hot(labels, outputs)) / size
    values = losses.sum(dim=(1, 2)) / size + penalty / 2 * weights.square().sum(dim=(1, 2))
    gradient = torch.empty_like(points)
    gradient[:, :-1] = torch.bmm(rows.mT, residuals) + penalty * weights
    gradient[:, -1] = residuals.sum(dim=1)
    return values, gradient.flatten(1)


_Floats: TypeAlias = npt.NDArray[np.float64]
_Flags: TypeAlias = npt.NDArray[np.bool_]

_PAIRS = 10  # remembered steps and gradient changes, SciPy's default
_EPS = float(np.finfo(float).eps)
_VALUE_TOLERANCE = 64 * _EPS  # scikit-learn's
_MAX_TRIALS = 50  # of a line search, scikit-learn's
_MIN_DECREASE = 1e-3  # of a line search, relative to the initial slope, as in L-BFGS-B
_MAX_SLOPE = 0.9
_IDLE = 0.125  # share of finished problems at which the others are copied


@dataclass
class Minimization:
    """L-BFGS for P functions at once; each follows the path of SciPy's L-BFGS-B without bounds.

    Directions are linear combinations of remembered steps, gradient changes and the gradient, so the recursion needs
    only their inner products: two passes over the memory per iteration, and small matrices on the host (Chen, Wang and
    Zhou, 2014, "Large-scale L-BFGS using MapReduce"). Row ``a`` of every array belongs to problem ``problems[a]``, and
    finished problems are removed.

    Attributes:
        objective: maps problem numbers ``(A,)`` and their points ``(A, K)`` to values ``(A,)`` and gradients.
        point: initial point of each problem, shape ``(P, K)``, float64.
        max_iterations: largest number of iterations of each problem.
        gradient_tolerance: a problem is finished when no entry of its gradient is larger, or its value decreases by
            no more than rounding.
        largest: maps problem numbers and gradients to the numbers that are compared with ``gradient_tolerance``.
    """

    objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    point: Tensor
    max_iterations: int
    gradient_tolerance: float
    largest: Callable[[Tensor, Tensor], Tensor] = lambda _, gradients: gradients.abs().amax(dim=1)

    def __post_init__(self) -> None:
        count = len(self.point)
        self.minimizers = self.point.clone()
        self.problems = torch.arange(count, device=self.point.device)
        self.point = self.point.clone()
        values, gradient = self.objective(self.problems, self.point)
        self.value = _host(values)
        # Rows 0 to 9 are steps, 10 to 19 the gradient changes over them, 20 the gradient.
        self.memory = gradient.new_zeros(count, 2 * _PAIRS + 1, gradient.shape[1])
        self.memory[:, -1] = gradient
        self.products = np.zeros((count, 2 * _PAIRS + 1, 2 * _PAIRS + 1))
        self.products[:, -1, -1] = _host(gradient.square().sum(dim=1))
        self.num_pairs = np.zeros(count, dtype=np.int64)  # since the memory was last cleared
        self.iterations = np.zeros(count, dtype=np.int64)
        self.idle = np.zeros(count, dtype=bool)  # finished, but not yet removed
        self.direction = torch.zeros_like(self.point)
        self.searches: npt.NDArray[Any] = np.empty(count, dtype=object)  # one line search per problem
        self.trials = np.zeros(count, dtype=np.int64)
        self.step = np.ones(count)
        self.start_slope = np.zeros(count)

    def run(self) -> Tensor:
        """Return the minimizers, shape ``(P, K)``."""
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
        valid = np.isfinite(value) & ~self.idle
        with np.errstate(all="ignore"):
            decreased = value <= self.value + self.step * (_MIN_DECREASE * self.start_slope)
            accepted = valid & decreased & (np.abs(slope) <= -_MAX_SLOPE * self.start_slope)
            # Most steps are accepted by this test, which is the search's own; the others need its next step.
            for row in np.flatnonzero(valid & ~accepted):
                if self.searches[row] is None:
                    search = DCSRCH(None, None, ftol=_MIN_DECREASE, gtol=_MAX_SLOPE, xtol=0.1, stpmin=0, stpmax=1e10)
                    search._iterate(self.step[row], self.value[row], self.start_slope[row], b"START")
                    self.searches[row] = search
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
        slot = torch.from_numpy(slots[useful]).to(rows.device)
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
        self.searches[selected] = None
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


@dataclass(frozen=True)
class ClassifierData:
    """Rows and labels that one classifier is trained and tested on; labels are numbered from 0."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Classifiers:
    """The classifiers of a task and their settings.

    Attributes:
        data: of each classifier.
        strength: scikit-learn's ``C``.
        max_iterations: scikit-learn's ``max_iter``.
        tolerance: scikit-learn's ``tol``.
        measure: score of test labels and predictions; ``None`` for accuracy.
    """

    data: tuple[ClassifierData, ...]
    strength: float = 1.0
    max_iterations: int = 100
    tolerance: float = 1e-4
    measure: Callable[[Any, Any], float] | None = None

    def resampled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean score of the classifiers ``(L,)``, and scores on resampled test rows ``(L, S)``.

        The second has columns for accuracy only.
        """
        total = vectors.new_zeros(len(vectors), dtype=torch.float64)
        groups: dict[Any, list[ClassifierData]] = {}  # of classifiers that can be trained at once
        shares: dict[Any, Tensor] = {}  # of the score that each test row contributes, by test set
        for data in self.data:
            classes = tuple(torch.unique(data.train_labels).tolist())
            groups.setdefault((len(data.train), classes, tuple(data.test.tolist())), []).append(data)
        for group in groups.values():
            predicted = self.predictions(vectors, group)
            labels = torch.stack([data.test_labels for data in group]).to(predicted.device)
            total += self._measured(labels, predicted).sum(dim=1)
            test = tuple(group[0].test.tolist())
            share = (predicted == labels).double().sum(dim=1) / (len(test) * len(self.data))
            shares[test] = share + shares[test] if test in shares else share
        rows = torch.cat(list(shares.values()), dim=1)
        resampled = resampled_means(rows * rows.shape[1]) if self.measure is None else rows[:, :0]
        return total / len(self.data), resampled

    def predictions(self, vectors: Tensor, group: Sequence[ClassifierData]) -> Tensor:
        """Return the predicted labels of T test rows, shape ``(L, E, T)``.

        Args:
            vectors: of N rows at L layers, shape ``(L, N, D)``.
            group: of E classifiers with the same classes, number of training rows, and test rows.
        """
        device, layers = vectors.device, len(vectors)
        classes = torch.unique(group[0].train_labels)  # classes without an example are never predicted
        if len(classes) < 2:
            raise OptionError("A classification task must have training examples of two or more classes, but has one.")
        train = torch.stack([data.train for data in group]).to(device)
        labels = torch.searchsorted(classes, torch.stack([data.train_labels for data in group])).to(device)
        weights, bias = logistic_regressions(
            vectors[:, train].flatten(0, 1),
            labels.repeat(layers, 1),
            classes=len(classes),
            strength=self.strength,
            max_iterations=self.max_iterations,
            tolerance=self.tolerance,
        )
        weights, bias = (x.to(vectors.dtype).view(layers, -1, *x.shape[1:]) for x in (weights, bias))
        test = vectors[:, group[0].test.to(device)]
        predicted = []
        for number in range(len(group)):
            logits = test @ weights[:, number] + bias[:, number, None]
            predicted.append((logits[..., 0] > 0).long() if logits.shape[2] == 1 else logits.argmax(dim=2))
        labels_of_classes: Tensor = classes.to(device)[torch.stack(predicted, dim=1)]
        return labels_of_classes

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        first = self.data[0]
        size, classes = len(first.train), len(torch.unique(first.train_labels))
        inner = size if 2 * size <= dim else dim
        # In eight bytes: the rows, the memory of L-BFGS and the temporaries of an evaluation.
        solving = 2 * len(self.data) * (size * dim + 28 * (inner + 1) * classes + 6 * size * classes)
        return rows * dim + solving + len(first.test) * (dim + 2 * classes)

    def _measured(self, labels: Tensor, predicted: Tensor) -> Tensor:
        """Return the score of each classifier, shape ``(L, E)``."""
        if self.measure is None:
            return (predicted == labels).double().mean(dim=2)
        values = [
            [self.measure(y.numpy(), x.numpy()) for x, y in zip(layer, labels.cpu(), strict=True)]
            for layer in predicted.cpu()
        ]
        return torch.tensor(values, dtype=torch.float64, device=predicted.device)
