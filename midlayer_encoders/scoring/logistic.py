"""Logistic regressions of many layers and draws side by side: scikit-learn's, by the same steps of L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, softplus

from midlayer_encoders.scoring.lbfgs import lbfgs


def logistic_regressions(
    rows: Tensor, labels: Tensor, *, classes: int, strength: float = 1.0, max_iterations: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    r"""Return the weights ``(P, D, C)`` and biases ``(P, C)`` of P regressions; of two classes only the second's.

    .. math::
        \min_{W, b} \frac1S \sum_s -\log \operatorname{softmax}(W x_s + b)_{y_s} + \frac{1}{2 S\,c} \lVert W \rVert^2

    is scikit-learn's ``LogisticRegression(C=c)``; with two classes it takes one weight and the sigmoid, which is
    another penalty. Iterates lie in the span of the rows, and the path does not depend on the basis, so where there are
    fewer rows than dimensions the regressions are solved in a basis of theirs. Only the size of a gradient's entries,
    by which scikit-learn stops, depends on the basis, and is taken in the rows' own.

    Args:
        rows: shape ``(P, S, D)``.
        labels: from 0 to ``classes - 1``, all of them there, shape ``(P, S)``.
        classes: number C of classes, at least 2.
        strength: scikit-learn's ``C``.
        max_iterations: of L-BFGS.
        tolerance: scikit-learn's ``tol``, for the largest entry of the gradient.
    """
    count, size, dim = rows.shape
    rows = rows.double()
    basis: Tensor | None = None
    if 2 * size <= dim:
        rows, basis = _in_own_basis(rows)
    problem = _Problem(rows, labels, 1 if classes == 2 else classes, 1 / (strength * size))
    start = rows.new_zeros(count, (rows.shape[2] + 1) * problem.outputs)
    how: dict[str, Any] = {"max_iterations": max_iterations, "gradient_tolerance": tolerance}
    if basis is None:
        found = lbfgs(problem, start, **how)
    else:
        found = lbfgs(problem, start, **how, largest=_Largest(basis, problem.outputs, tolerance))
    found = found.view(count, rows.shape[2] + 1, problem.outputs)
    weights = found[:, :-1] if basis is None else torch.bmm(basis, found[:, :-1])
    return weights, found[:, -1]


def _in_own_basis(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the coordinates ``(P, S, S)`` of rows in an orthonormal basis of their span, and it, ``(P, D, S)``."""
    values, vectors = torch.linalg.eigh(torch.bmm(rows, rows.mT))
    # Below the rounding of the products a direction is noise: it gets no coordinate.
    large = values > values[:, -1:] * rows.shape[1] * torch.finfo(rows.dtype).eps
    roots = torch.where(large, values, 1).sqrt()
    coordinates = vectors * torch.where(large, roots, 0)[:, None]
    return coordinates, torch.bmm(rows.mT, vectors * torch.where(large, 1 / roots, 0)[:, None])


@dataclass(frozen=True)
class _Largest:
    """The largest entry of a gradient in the standard basis, or a lower bound of it that is above the tolerance."""

    basis: Tensor
    outputs: int
    tolerance: float

    def __call__(self, places: Tensor, gradients: Tensor) -> Tensor:
        gradients = gradients.view(len(gradients), -1, self.outputs)
        bias = gradients[:, -1].abs().amax(dim=1)
        least = torch.linalg.vector_norm(gradients[:, :-1], dim=1).amax(dim=1) / self.basis.shape[1] ** 0.5
        near = (torch.maximum(least, bias) <= self.tolerance).nonzero()[:, 0]
        if len(near):
            least[near] = torch.bmm(self.basis[places[near]], gradients[near, :-1]).abs().amax(dim=(1, 2))
        return torch.maximum(least, bias)


@dataclass(frozen=True)
class _Problem:
    """Value and gradient of P regressions; a point holds a row of weights for each dimension, and the biases last."""

    rows: Tensor
    labels: Tensor
    outputs: int
    penalty: float

    def __call__(self, places: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        whole = len(places) == len(self.rows)
        rows, labels = (self.rows, self.labels) if whole else (self.rows[places], self.labels[places])
        size = rows.shape[1]
        points = points.view(len(points), -1, self.outputs)
        weights = points[:, :-1]
        logits = torch.baddbmm(points[:, -1:], rows, weights)
        if self.outputs == 1:
            wanted = labels[..., None].to(logits)
            losses = softplus(logits) - wanted * logits
            change = (logits.sigmoid() - wanted) / size
        else:
            logged = log_softmax(logits, dim=2)
            losses = -logged.gather(2, labels[..., None])
            change = (logged.exp() - one_hot(labels, self.outputs)) / size
        values = losses.sum(dim=(1, 2)) / size + self.penalty / 2 * weights.square().sum(dim=(1, 2))
        gradient = torch.empty_like(points)
        gradient[:, :-1] = torch.bmm(rows.mT, change) + self.penalty * weights
        gradient[:, -1] = change.sum(dim=1)
        return values, gradient.flatten(1)
