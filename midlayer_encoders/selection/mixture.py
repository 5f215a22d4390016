"""A mean of layers whose weights are learned from labels: a softmax over layers under a ridge head, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.selection.ridge import equal_steps, label_folds, resampled_means, ridge_correct, ridge_predicted

__all__ = ["Mixture", "held_out_mixture", "mixed", "mixture_correct", "mixture_on_test", "mixture_weights"]

_STEPS, _RATE = 20, 0.3  # of Adam: more change little (docs/selection.md)
_PENALTY = -2.0  # logarithm of the first penalty, in units of the mean squared length of the rows
_LEAST = 0.5  # of an equal share: layers below it are left out
_MOST = 300  # examples that weights are fitted on, at equal steps: a step costs the cube of their number


@dataclass(frozen=True)
class Mixture:
    """Layers and weights, learned from labels, and what they are worth on examples that were left out.

    Attributes:
        layers: ascending.
        weights: of each, with the sum 1, as ``LayerEncoder(model, layers, layer_weights=weights)`` takes them.
        accuracy: of a ridge classifier on the mixture, for examples that neither weights nor classifier were fitted on.
        single: the best single layer.
        single_accuracy: of the same classifier on it, for the same examples.
        low: lower end of the 95 % interval of the difference, in points of accuracy.
        high: upper end.
    """

    layers: tuple[int, ...]
    weights: tuple[float, ...]
    accuracy: float
    single: int
    single_accuracy: float
    low: float
    high: float

    @property
    def better(self) -> bool:
        """Whether it is better than the best single layer beyond what other draws of the examples would change."""
        return self.low > 0 and len(self.layers) > 1

    def verdict(self) -> str:
        """Return in a sentence what it is made of, and what it gains."""
        if len(self.layers) == 1:
            return f"A mixture of layers would be layer {self.layers[0]} alone: its weight is 1."
        parts = ", ".join(f"{layer} ({weight:.2g})" for layer, weight in zip(self.layers, self.weights, strict=True))
        sure = "surely better" if self.low > 0 else "surely worse" if self.high < 0 else "not surely better"
        gain = 100 * (self.accuracy - self.single_accuracy)
        return (
            f"A mixture of layers {parts} has {100 * self.accuracy:.1f} under a ridge classifier, {sure} than layer "
            f"{self.single} alone, the best, with {100 * self.single_accuracy:.1f} "
            f"({gain:+.1f} points, {self.low:+.1f} to {self.high:+.1f})."
        )


def mixture_weights(vectors: Tensor, classes: Tensor) -> Tensor:
    r"""Return the weights of layers whose mean tells classes apart best, shape ``(L,)``, not negative, with the sum 1.

    .. math::
        \min_{\theta, \lambda} \sum_i \Bigl\lVert \frac{y_i - \hat y_i}{1 - h_i} \Bigr\rVert^2, \qquad
        x_i = \sum_l \operatorname{softmax}(\theta)_l\, \frac{v_{li}}{s_l}

    the squared error of leaving one example out of a ridge regression on the unit-length, centered rows :math:`x_i`,
    with :math:`s_l` the mean length of the layer's vectors. Layers with less than half an equal share are left out, and
    weights are rounded to three digits, so that they can be written down.

    Args:
        vectors: of each layer and example, shape ``(L, N, D)``.
        classes: numbers from ``0``, shape ``(N,)``.

    Example:
        >>> classes = torch.arange(40) % 2
        >>> vectors = torch.randn(3, 40, 4, generator=torch.Generator().manual_seed(0))
        >>> vectors[1] += 2.0 * (2 * classes[:, None] - 1)  # the others tell nothing
        >>> mixture_weights(vectors, classes)
        tensor([0., 1., 0.], dtype=torch.float64)
    """
    some = equal_steps(len(classes), _MOST)
    vectors, classes = vectors[:, some].float(), classes[some].to(vectors.device)
    sizes = vectors.norm(dim=-1).mean(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    rows = vectors / sizes[:, None, None]
    targets = torch.nn.functional.one_hot(classes).double()
    targets = targets - targets.mean(dim=0)
    with torch.enable_grad():
        logits = torch.zeros(len(rows), device=rows.device, requires_grad=True)
        penalty = torch.tensor(_PENALTY, device=rows.device, requires_grad=True)
        optimizer = torch.optim.Adam([logits, penalty], lr=_RATE)
        for _ in range(_STEPS):
            loss = _left_out_error(mixed(rows, logits.softmax(dim=0)).double(), targets, penalty.double().exp())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    shares = logits.detach().softmax(dim=0)
    weights = torch.where(shares < _LEAST / len(shares), 0.0, shares) / sizes
    digits = [float(f"{weight:.3g}") for weight in (weights / weights.sum()).tolist()]
    return torch.tensor(digits, dtype=torch.float64) / sum(digits)


def mixed(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of layers, shape ``(N, D)``, of vectors ``(L, N, D)`` and weights ``(L,)``."""
    return torch.einsum("l,lnd->nd", weights.to(vectors), vectors)


def mixture_correct(vectors: Tensor, labels: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    """Return whether a mixture fitted on the other folds labels each text rightly, shape ``(N,)``, bool.

    The folds are those of :func:`~midlayer_encoders.selection.ridge.ridge_correct` with the same seed.

    Args:
        vectors: one row per layer and text, shape ``(L, N, D)``.
        labels: integers, shape ``(N,)``.
        folds: number of parts, of which each is left out once.
        seed: of the folds.
    """
    labels = labels.to(vectors.device)
    fold = label_folds(labels, folds=folds, seed=seed)
    classes = torch.unique(labels, return_inverse=True)[1]
    right = torch.zeros(len(labels), dtype=torch.bool, device=vectors.device)
    for left_out in range(folds):
        test = fold == left_out
        rows = mixed(vectors, mixture_weights(vectors[:, ~test], classes[~test]))[None]
        right[test] = (ridge_predicted(rows[:, ~test], classes[~test], rows[:, test]) == classes[test])[0]
    return right


def held_out_mixture(
    vectors: Tensor, labels: Tensor, alone: Tensor, layers: Sequence[int], *, repeats: int = 1, seed: int = 0
) -> Mixture:
    """Return the mixture of all labeled texts, scored by cross-validation against the best layer alone.

    The best layer is chosen on the texts that it is scored on, which flatters it: the mixture must beat that.

    Args:
        vectors: one row per layer and text, shape ``(L, N, D)``.
        labels: integers, shape ``(N,)``.
        alone: how often each layer labels each text rightly when it is left out, shape ``(L, N)``.
        layers: their numbers.
        repeats: ways to deal the folds.
        seed: of the first.
    """
    draws = [mixture_correct(vectors, labels, seed=seed + repeat) for repeat in range(repeats)]
    right = torch.stack(draws).double().mean(dim=0)
    best = int(alone.double().mean(dim=1).argmax())
    classes = torch.unique(labels, return_inverse=True)[1]
    return _answer(mixture_weights(vectors, classes), right, alone[best].double(), layers, best, seed=seed)


def mixture_on_test(
    vectors: Tensor, classes: Tensor, train: Tensor, test: Tensor, layers: Sequence[int], *, seed: int = 0
) -> Mixture:
    """Return the mixture of training examples, scored on test examples against the best layer alone.

    The best layer is chosen by cross-validation on the training examples.

    Args:
        vectors: one row per layer and example, shape ``(L, N, D)``.
        classes: numbers from ``0``, shape ``(N,)``.
        train: positions of the training examples.
        test: positions of the test examples.
        layers: their numbers.
        seed: of the folds and resamples.
    """
    train, test, classes = (one.to(vectors.device) for one in (train, test, classes))
    known, asked, truth = vectors[:, train], vectors[:, test], classes[test]
    best = int(ridge_correct(known, classes[train], seed=seed).double().mean(dim=1).argmax())
    weights = mixture_weights(known, classes[train])
    both = [mixed(known, weights), known[best]], [mixed(asked, weights), asked[best]]
    named = [ridge_predicted(a[None], classes[train], b[None])[0] for a, b in zip(*both, strict=True)]
    right, alone = ((one == truth).double() for one in named)
    return _answer(weights, right, alone, layers, best, seed=seed)


def _answer(weights: Tensor, right: Tensor, alone: Tensor, layers: Sequence[int], best: int, *, seed: int) -> Mixture:
    means = resampled_means(torch.stack([right, alone]), seed=seed)
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64, device=means.device)
    low, high = torch.quantile(100 * (means[:, 0] - means[:, 1]), bounds).tolist()
    taken = weights.nonzero().flatten().tolist()
    return Mixture(
        layers=tuple(layers[place] for place in taken),
        weights=tuple(float(f"{weights[place]:.3g}") for place in taken),
        accuracy=float(right.mean()),
        single=layers[best],
        single_accuracy=float(alone.mean()),
        low=low,
        high=high,
    )


def _left_out_error(rows: Tensor, targets: Tensor, penalty: Tensor) -> Tensor:
    """Return the mean squared error of leaving one row out of a ridge regression of ``(N, C)`` on ``(N, D)``."""
    rows = torch.nn.functional.normalize(rows, dim=-1)
    rows = rows - rows.mean(dim=0)
    gram, one = rows @ rows.mT, torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    ridge = penalty * gram.diagonal().mean().clamp(min=1e-12)
    # What is fitted of each target: K (K + c)^-1 = 1 - c (K + c)^-1.
    hat = one - ridge * torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge * one))
    lever = hat.diagonal() + 1 / len(rows)
    return ((targets - hat @ targets) / (1 - lever).clamp(min=1e-6)[:, None]).square().sum() / len(rows)
