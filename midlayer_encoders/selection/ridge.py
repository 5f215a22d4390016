"""Score how well each layer separates labels, by cross-validated ridge, and learn a weighted mean of layers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from midlayer_encoders.errors import OptionError, counted, short_repr
from midlayer_encoders.validation import check_list, lone_surrogate

_PENALTIES = tuple(10.0**power for power in range(-4, 3))
"""Candidates for each layer and fold, in units of the mean squared norm of the training rows."""

_STEPS = 20  # of Adam on the weights of a mixture: more change little (docs/selection.md)
_LEARNING_RATE = 0.3
_INITIAL_LOG_PENALTY = -2.0  # of a mixture, in the same units
_MIN_SHARE = 0.5  # of an equal share: layers below it are left out
_MAX_EXAMPLES = 300  # a step costs the cube of their number


def ridge_correct(vectors: Tensor, labels: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    r"""Return whether each layer predicts the label of each text, which is left out of the training folds.

    .. math::
        \hat y_i = \arg\max_c\, (x_i - \bar x)^\top (X^\top X + \lambda I)^{-1} X^\top Y_c + \bar Y_c

    over unit-length rows, centered on the training texts, with one column of Y per class. The penalty is chosen within
    each training set by the leave-one-out squared error, which also has a closed form.

    Args:
        vectors: one row per layer and text, shape ``(L, N, D)``.
        labels: integers, shape ``(N,)``; a class with one text can never be predicted, which lowers every layer alike.
        folds: number of folds; every class is spread over them evenly.
        seed: for the folds.

    Returns:
        Shape ``(L, N)``, bool; its mean over texts is the accuracy of each layer.

    Example:
        >>> labels = torch.arange(12) % 3
        >>> good, constant = torch.eye(3)[labels], torch.ones(12, 3)
        >>> ridge_correct(torch.stack([good, constant]), labels).double().mean(dim=1)[0]
        tensor(1., dtype=torch.float64)
    """
    labels = labels.to(vectors.device)
    if vectors.ndim != 3 or not vectors.is_floating_point() or vectors.shape[1:2] != labels.shape:
        raise OptionError(
            "`vectors` must be (L, N, D) of floats with one of the N `labels` each, "
            f"but got {tuple(vectors.shape)} of {vectors.dtype} and {tuple(labels.shape)}."
        )
    fold = label_folds(labels, folds=folds, seed=seed)
    classes = torch.unique(labels, return_inverse=True)[1]
    is_correct = torch.zeros(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
    for left_out in range(folds):
        test = fold == left_out
        is_correct[:, test] = ridge_predict(vectors[:, ~test], classes[~test], vectors[:, test]) == classes[test]
    return is_correct


def ridge_predict(train_rows: Tensor, classes: Tensor, test_rows: Tensor) -> Tensor:
    """Return the class of each test row, shape ``(L, M)``, predicted by the ridge of :func:`ridge_correct`.

    Args:
        train_rows: shape ``(L, N, D)``.
        classes: of the training rows, numbers from ``0``, shape ``(N,)``.
        test_rows: shape ``(L, M, D)``.
    """
    rows = normalize(train_rows.double(), dim=-1)
    test_rows = normalize(test_rows.double(), dim=-1)
    targets = one_hot(classes.to(rows.device)).double()
    center = rows.mean(dim=1, keepdim=True)
    level = targets.mean(dim=0)
    rows = rows - center
    targets = targets - level
    # Left vectors (L, N, R), squared singular values (L, R) and right vectors (L, D, R), from the smaller Gram matrix.
    is_wide = rows.shape[1] <= rows.shape[2]
    squares, vectors = torch.linalg.eigh(rows @ rows.mT if is_wide else rows.mT @ rows)
    # Infinity marks rounding errors, whose shrinkage is zero below.
    largest = squares.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    squares = torch.where(squares > 1e-12 * largest, squares, torch.inf)
    other = (rows.mT if is_wide else rows) @ vectors / squares.sqrt().unsqueeze(-2)
    left, right = (vectors, other) if is_wide else (other, vectors)
    scale = rows.square().sum(dim=(1, 2)) / rows.shape[1]
    penalties = torch.tensor(_PENALTIES, dtype=rows.dtype, device=rows.device)[:, None, None] * scale[:, None]
    shrinkage = torch.where(squares.isinf(), 0.0, squares / (squares + penalties))  # (P, L, R)
    projected = left.mT @ targets  # (L, R, C)
    errors = []  # leave-one-out squared error of each penalty and layer
    for factors in shrinkage:
        residuals = targets - left @ (factors.unsqueeze(-1) * projected)
        leverage = (left.square() * factors.unsqueeze(-2)).sum(dim=-1) + 1 / len(targets)
        errors.append((residuals / (1 - leverage).clamp(min=1e-9).unsqueeze(-1)).square().sum(dim=(1, 2)))
    best = torch.stack(errors).argmin(dim=0)
    weights = shrinkage[best, torch.arange(len(rows), device=rows.device)] / squares.sqrt()  # (L, R)
    logits: Tensor = ((test_rows - center) @ right) @ (weights.unsqueeze(-1) * projected) + level
    return logits.argmax(dim=-1)


def equal_steps(count: int, most: int) -> list[int]:
    """Return up to ``most`` positions at equal steps, which samples a sorted list evenly.

    Example:
        >>> equal_steps(10, 4)
        [0, 2, 5, 7]
    """
    return list(range(count)) if count <= most else [count * position // most for position in range(most)]


def label_list(argument: str, labels: Any) -> list[Any]:
    """Return the labels as a list, ``None`` for unlabeled examples, or raise an :class:`OptionError`."""
    values = check_list(argument, labels, "labels", minimum=0)
    values = [value.item() if getattr(value, "ndim", 1) == 0 else value for value in values]  # NumPy and torch scalars
    for position, label in enumerate(values):
        is_class = label is None or (isinstance(label, str | int | float) and label == label)
        if not is_class or (isinstance(label, str) and lone_surrogate(label) is not None):
            raise OptionError(
                f"`{argument}[{position}]` must be the name or the number of a class, but got {short_repr(label)}."
            )
    return values


def class_numbers(labels: Sequence[Hashable]) -> tuple[Tensor, list[str]]:
    """Return the class of each example as a number from ``0``, shape ``(N,)``, and the classes' names in order.

    Example:
        >>> class_numbers(["cat", "dog", "cat"])
        (tensor([0, 1, 0]), ['cat', 'dog'])
    """
    names: list[Any] = sorted(set(labels), key=lambda name: (str(type(name)), name))
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers[label] for label in labels], dtype=torch.int64), [str(name) for name in names]


def label_folds(labels: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    """Return the fold of each text, ``0`` to ``folds - 1``, shape ``(N,)``; every class is spread over them evenly.

    Example:
        >>> label_folds(torch.tensor([0, 0, 0, 1, 1, 1]), folds=3).reshape(2, 3).sort().values
        tensor([[0, 1, 2],
                [0, 1, 2]])
    """
    check_labels(labels, folds=folds)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[labels.cpu()[shuffled].argsort(stable=True)]
    fold = torch.empty(len(labels), dtype=torch.int64)
    fold[by_class] = torch.arange(len(labels)) % folds
    return fold.to(labels.device)


def resampled_means(values: Tensor, *, resamples: int = 1000, seed: int = 0) -> Tensor:
    """Return the mean of every layer on texts drawn with replacement, the same texts for all layers.

    Quantiles over the first axis are bootstrap intervals; differences between columns compare layers pairwise.

    Args:
        values: one number or bool per layer and text, shape ``(L, N)``.
        resamples: number of draws, R.
        seed: for the draws.

    Returns:
        Shape ``(R, L)``, float64.

    Example:
        >>> resampled_means(torch.ones(2, 5, dtype=torch.bool), resamples=3)[0]
        tensor([1., 1.], dtype=torch.float64)
    """
    count = values.shape[1]
    drawn = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(resamples, count).double().scatter_add_(1, drawn, torch.ones(drawn.shape).double())
    return weights.to(values.device) @ values.double().mT / count


def gain_interval(values: Tensor, baseline: Tensor, *, seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean difference of two tensors of shape ``(N,)``.

    Example:
        >>> gain_interval(torch.ones(20), torch.zeros(20))
        (1.0, 1.0)
    """
    means = resampled_means(torch.stack([values, baseline]), seed=seed)
    bounds = torch.tensor([0.025, 0.975], dtype=means.dtype, device=means.device)
    low, high = torch.quantile(means[:, 0] - means[:, 1], bounds).tolist()
    return low, high


def check_labels(labels: Tensor, *, folds: int = 5) -> None:
    """Raise an :class:`OptionError` if labels cannot be cross-validated."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise OptionError(
            f"`labels` must be one integer for each text, but got {tuple(labels.shape)} of {labels.dtype}."
        )
    if folds < 2:
        raise OptionError(f"`folds` must be 2 or more, but got {folds}.")
    if len(labels) < 2 * folds:
        raise OptionError(
            f"`labels` must be at least {2 * folds} for {folds} folds, but there are {len(labels)}: label more texts."
        )
    usable = int((torch.unique(labels, return_counts=True)[1] > 1).sum())
    if usable < 2:
        raise OptionError(
            "`labels` must have 2 classes or more with at least 2 texts each, "
            f"but {len(labels)} labels have {counted(usable, 'such class', 'such classes')}: label more."
        )


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
    targets = one_hot(classes).double()
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

    The folds are those of :func:`ridge_correct` with the same seed.

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
    rows = normalize(rows, dim=-1)
    rows = rows - rows.mean(dim=0)
    gram = rows @ rows.mT
    identity = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    ridge = penalty * gram.diagonal().mean().clamp(min=1e-12)
    # The hat matrix: K (K + c)^-1 = 1 - c (K + c)^-1.
    hat = identity - ridge * torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge * identity))
    leverage = hat.diagonal() + 1 / len(rows)
    return ((targets - hat @ targets) / (1 - leverage).clamp(min=1e-6)[:, None]).square().sum() / len(rows)
