"""Learn a weighted mean of layers from labels: a softmax over layers with a closed-form ridge head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.selection.ridge import equal_steps, gain_interval, label_folds, ridge_correct, ridge_predict

_STEPS = 20  # more change little (docs/selection.md)
_LEARNING_RATE = 0.3
_INITIAL_LOG_PENALTY = -2.0  # in units of the mean squared norm of the rows
_MIN_SHARE = 0.5  # of an equal share: layers below it are left out
_MAX_EXAMPLES = 300  # a step costs the cube of their number


@dataclass(frozen=True)
class Mixture:
    """Layers and weights learned from labels, and their accuracy on held-out examples.

    Attributes:
        layers: ascending.
        weights: of the layers, with the sum 1, for ``LayerEncoder(model, layers, layer_weights=weights)``.
        accuracy: of a ridge classifier on the mixture, for held-out examples.
        single: the best single layer.
        single_accuracy: of the same classifier on that layer.
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
        """True if the mixture is significantly better than the best single layer."""
        return self.low > 0 and len(self.layers) > 1

    def verdict(self) -> str:
        """Return a sentence that lists layers and weights, and compares them with the best single layer."""
        if len(self.layers) == 1:
            return f"The mixture of layers is layer {self.layers[0]} alone, with weight 1."
        parts = ", ".join(f"{layer} ({weight:.2g})" for layer, weight in zip(self.layers, self.weights, strict=True))
        is_worse = "significantly worse" if self.high < 0 else "not significantly better"
        comparison = "significantly better" if self.low > 0 else is_worse
        gain = 100 * (self.accuracy - self.single_accuracy)
        return (
            f"A mixture of layers {parts} has {100 * self.accuracy:.1f} with a ridge classifier, {comparison} than "
            f"layer {self.single} alone, the best, with {100 * self.single_accuracy:.1f} "
            f"({gain:+.1f} points, {self.low:+.1f} to {self.high:+.1f})."
        )


def mixture_weights(vectors: Tensor, classes: Tensor) -> Tensor:
    r"""Return the nonnegative weights of layers whose mean best separates classes, shape ``(L,)``, with the sum 1.

    .. math::
        \min_{\theta, \lambda} \sum_i \Bigl\lVert \frac{y_i - \hat y_i}{1 - h_i} \Bigr\rVert^2, \qquad
        x_i = \sum_l \operatorname{softmax}(\theta)_l\, \frac{v_{li}}{s_l}

    the leave-one-out squared error of a ridge regression on the unit-length, centered rows :math:`x_i`, with
    :math:`s_l` the mean norm of the layer's vectors. Layers with less than half an equal share are left out, and
    weights are rounded to three digits.

    Args:
        vectors: of each layer and example, shape ``(L, N, D)``.
        classes: numbers from ``0``, shape ``(N,)``.

    Example:
        >>> classes = torch.arange(40) % 2
        >>> vectors = torch.randn(3, 40, 4, generator=torch.Generator().manual_seed(0))
        >>> vectors[1] += 2.0 * (2 * classes[:, None] - 1)  # the others are noise
        >>> mixture_weights(vectors, classes)
        tensor([0., 1., 0.], dtype=torch.float64)
    """
    sample = equal_steps(len(classes), _MAX_EXAMPLES)
    vectors = vectors[:, sample].float()
    classes = classes[sample].to(vectors.device)
    norms = vectors.norm(dim=-1).mean(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    rows = vectors / norms[:, None, None]
    targets = torch.nn.functional.one_hot(classes).double()
    targets = targets - targets.mean(dim=0)
    with torch.enable_grad():
        logits = torch.zeros(len(rows), device=rows.device, requires_grad=True)
        penalty = torch.tensor(_INITIAL_LOG_PENALTY, device=rows.device, requires_grad=True)
        optimizer = torch.optim.Adam([logits, penalty], lr=_LEARNING_RATE)
        for _ in range(_STEPS):
            mixed = mix_layers(rows, logits.softmax(dim=0)).double()
            loss = _leave_one_out_error(mixed, targets, penalty.double().exp())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    shares = logits.detach().softmax(dim=0)
    weights = torch.where(shares < _MIN_SHARE / len(shares), 0.0, shares) / norms
    rounded = [float(f"{weight:.3g}") for weight in (weights / weights.sum()).tolist()]
    return torch.tensor(rounded, dtype=torch.float64) / sum(rounded)


def mix_layers(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of layers, shape ``(N, D)``, of vectors ``(L, N, D)`` and weights ``(L,)``."""
    return torch.einsum("l,lnd->nd", weights.to(vectors), vectors)


def mixture_correct(vectors: Tensor, labels: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    """Return whether a mixture fitted on the other folds predicts the label of each text, shape ``(N,)``, bool.

    The folds are those of :func:`~midlayer_encoders.selection.ridge.ridge_correct` with the same seed.

    Args:
        vectors: one row per layer and text, shape ``(L, N, D)``.
        labels: integers, shape ``(N,)``.
        folds: number of folds.
        seed: for the folds.
    """
    labels = labels.to(vectors.device)
    fold = label_folds(labels, folds=folds, seed=seed)
    classes = torch.unique(labels, return_inverse=True)[1]
    is_correct = torch.zeros(len(labels), dtype=torch.bool, device=vectors.device)
    for left_out in range(folds):
        test = fold == left_out
        rows = mix_layers(vectors, mixture_weights(vectors[:, ~test], classes[~test]))[None]
        is_correct[test] = (ridge_predict(rows[:, ~test], classes[~test], rows[:, test]) == classes[test])[0]
    return is_correct


def held_out_mixture(vectors: Tensor, labels: Tensor, accuracy: Tensor, *, repeats: int = 1, seed: int = 0) -> Mixture:
    """Return the mixture learned from all labeled texts, cross-validated against the best single layer.

    The best layer is chosen on the texts that it is scored on, which biases the comparison against the mixture.

    Args:
        vectors: one row per layer and text, shape ``(L, N, D)``.
        labels: integers, shape ``(N,)``.
        accuracy: of each layer on each held-out text, shape ``(L, N)``.
        repeats: number of random folds.
        seed: for the first.
    """
    draws = [mixture_correct(vectors, labels, seed=seed + repeat) for repeat in range(repeats)]
    mixture_accuracy = torch.stack(draws).double().mean(dim=0)
    best = int(accuracy.double().mean(dim=1).argmax())
    weights = mixture_weights(vectors, torch.unique(labels, return_inverse=True)[1])
    return _make_mixture(weights, mixture_accuracy, accuracy[best].double(), range(len(vectors)), best, seed=seed)


def mixture_on_test(
    vectors: Tensor, classes: Tensor, train: Tensor, test: Tensor, layers: Sequence[int], *, seed: int = 0
) -> Mixture:
    """Return the mixture learned from training examples, scored on test examples against the best single layer.

    The best layer is chosen by cross-validation on the training examples.

    Args:
        vectors: one row per layer and example, shape ``(L, N, D)``.
        classes: numbers from ``0``, shape ``(N,)``.
        train: positions of the training examples.
        test: positions of the test examples.
        layers: numbers of the layers.
        seed: for folds and resamples.
    """
    train = train.to(vectors.device)
    test = test.to(vectors.device)
    classes = classes.to(vectors.device)
    best = int(ridge_correct(vectors[:, train], classes[train], seed=seed).double().mean(dim=1).argmax())
    weights = mixture_weights(vectors[:, train], classes[train])
    rows = torch.stack([mix_layers(vectors, weights), vectors[best]])
    is_correct = ridge_predict(rows[:, train], classes[train], rows[:, test]) == classes[test]
    accuracy, single_accuracy = is_correct.double()
    return _make_mixture(weights, accuracy, single_accuracy, layers, best, seed=seed)


def _make_mixture(
    weights: Tensor, accuracy: Tensor, single_accuracy: Tensor, layers: Sequence[int], best: int, *, seed: int
) -> Mixture:
    low, high = gain_interval(accuracy, single_accuracy, seed=seed)
    rows = weights.nonzero().flatten().tolist()
    return Mixture(
        layers=tuple(layers[row] for row in rows),
        weights=tuple(float(f"{weights[row]:.3g}") for row in rows),
        accuracy=float(accuracy.mean()),
        single=layers[best],
        single_accuracy=float(single_accuracy.mean()),
        low=100 * low,
        high=100 * high,
    )


def _leave_one_out_error(rows: Tensor, targets: Tensor, penalty: Tensor) -> Tensor:
    """Return the leave-one-out mean squared error of a ridge regression of targets ``(N, C)`` on rows ``(N, D)``."""
    rows = torch.nn.functional.normalize(rows, dim=-1)
    rows = rows - rows.mean(dim=0)
    gram = rows @ rows.mT
    identity = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    ridge = penalty * gram.diagonal().mean().clamp(min=1e-12)
    # The hat matrix: K (K + c)^-1 = 1 - c (K + c)^-1.
    hat = identity - ridge * torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge * identity))
    leverage = hat.diagonal() + 1 / len(rows)
    return ((targets - hat @ targets) / (1 - leverage).clamp(min=1e-6)[:, None]).square().sum() / len(rows)
