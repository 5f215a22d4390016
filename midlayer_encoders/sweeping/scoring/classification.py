"""Classification: logistic regressions on a few examples of each class, averaged over draws.

All layers and draws are solved at once, by the same L-BFGS steps as in scikit-learn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, one_hot, pad

from midlayer_encoders.errors import OptionError
from midlayer_encoders.sweeping.scoring.lbfgs import minimize_lbfgs
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
    points = minimize_lbfgs(
        partial(_objective, rows, labels, outputs, 1 / (strength * size)),
        rows.new_zeros(count, (rows.shape[2] + 1) * outputs),
        max_iterations=max_iterations,
        tolerance=tolerance,
        largest=partial(_largest_entry, basis, outputs, tolerance),
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


def _largest_entry(basis: Tensor | None, outputs: int, tolerance: float, problems: Tensor, gradients: Tensor) -> Tensor:
    """Return the largest entry of gradients in the original basis, or a lower bound of it above the tolerance."""
    gradients = gradients.view(len(gradients), -1, outputs)
    if basis is None:
        return gradients.abs().amax(dim=(1, 2))
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
        rows, labels = rows[problems], labels[problems]
    size = rows.shape[1]
    points = points.view(len(points), -1, outputs)
    weights = points[:, :-1]
    logits = torch.baddbmm(points[:, -1:], rows, weights)
    if outputs == 1:
        logits = pad(logits, (1, 0))  # of two classes the first has the logit 0
    log_shares = log_softmax(logits, dim=2)
    losses = -log_shares.gather(2, labels[..., None])
    residuals = ((log_shares.exp() - one_hot(labels, logits.shape[2])) / size)[..., -outputs:]
    values = losses.sum(dim=(1, 2)) / size + penalty / 2 * weights.square().sum(dim=(1, 2))
    gradient = torch.cat([torch.bmm(rows.mT, residuals) + penalty * weights, residuals.sum(dim=1, keepdim=True)], dim=1)
    return values, gradient.flatten(1)


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

    def bootstrap(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
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
            total += self._score(labels, predicted).sum(dim=1)
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

    def _score(self, labels: Tensor, predicted: Tensor) -> Tensor:
        """Return the score of each classifier, shape ``(L, E)``."""
        if self.measure is None:
            return (predicted == labels).double().mean(dim=2)
        values = [
            [self.measure(y.numpy(), x.numpy()) for x, y in zip(layer, labels.cpu(), strict=True)]
            for layer in predicted.cpu()
        ]
        return torch.tensor(values, dtype=torch.float64, device=predicted.device)
