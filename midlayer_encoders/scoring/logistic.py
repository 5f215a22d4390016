"""Logistic regressions of many layers and draws at once, by the same L-BFGS steps as scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, softplus

from midlayer_encoders.scoring.lbfgs import lbfgs


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
    points = lbfgs(
        _Objective(rows, labels, outputs, 1 / (strength * size)),
        rows.new_zeros(count, (rows.shape[2] + 1) * outputs),
        max_iterations=max_iterations,
        gradient_tolerance=tolerance,
        **({} if basis is None else {"largest": _LargestEntry(basis, outputs, tolerance)}),
    ).view(count, -1, outputs)
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


@dataclass(frozen=True)
class _LargestEntry:
    """The largest entry of a gradient in the original basis, or a lower bound of it above the tolerance."""

    basis: Tensor
    outputs: int
    tolerance: float

    def __call__(self, problems: Tensor, gradients: Tensor) -> Tensor:
        gradients = gradients.view(len(gradients), -1, self.outputs)
        bias = gradients[:, -1].abs().amax(dim=1)
        least = torch.linalg.vector_norm(gradients[:, :-1], dim=1).amax(dim=1) / self.basis.shape[1] ** 0.5
        near = (torch.maximum(least, bias) <= self.tolerance).nonzero()[:, 0]
        if len(near):
            least[near] = torch.bmm(self.basis[problems[near]], gradients[near, :-1]).abs().amax(dim=(1, 2))
        return torch.maximum(least, bias)


@dataclass(frozen=True)
class _Objective:
    """Value and gradient of P regressions; a point holds one row of weights per dimension, then the biases."""

    rows: Tensor
    labels: Tensor
    outputs: int
    penalty: float

    def __call__(self, problems: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        complete = len(problems) == len(self.rows)
        rows = self.rows if complete else self.rows[problems]
        labels = self.labels if complete else self.labels[problems]
        size = rows.shape[1]
        points = points.view(len(points), -1, self.outputs)
        weights = points[:, :-1]
        logits = torch.baddbmm(points[:, -1:], rows, weights)
        if self.outputs == 1:
            targets = labels[..., None].to(logits)
            losses = softplus(logits) - targets * logits
            residuals = (logits.sigmoid() - targets) / size
        else:
            log_shares = log_softmax(logits, dim=2)
            losses = -log_shares.gather(2, labels[..., None])
            residuals = (log_shares.exp() - one_hot(labels, self.outputs)) / size
        values = losses.sum(dim=(1, 2)) / size + self.penalty / 2 * weights.square().sum(dim=(1, 2))
        gradient = torch.empty_like(points)
        gradient[:, :-1] = torch.bmm(rows.mT, residuals) + self.penalty * weights
        gradient[:, -1] = residuals.sum(dim=1)
        return values, gradient.flatten(1)
