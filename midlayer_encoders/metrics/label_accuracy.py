"""Score how well each layer separates labels, by cross-validated ridge."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from midlayer_encoders.errors import OptionError, pluralize, short_repr
from midlayer_encoders.validation import check_count, check_list, lone_surrogate

#: Candidates for each layer and fold, in units of the mean squared norm of the training rows.
_PENALTIES = tuple(10.0**power for power in range(-4, 3))
_ROUNDING = 1e-6  # relative difference between vectors of the same input in different batches


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


def gain_in_points(accuracy: Tensor, baseline: Tensor, *, seed: int) -> dict[str, Any]:
    """Return the gain of one accuracy over another, shape ``(N,)`` each, and its 95 % interval, in points."""
    low, high = gain_interval(accuracy, baseline, seed=seed)
    return {"gain": 100 * float(accuracy.mean() - baseline.mean()), "low": 100 * low, "high": 100 * high}


def check_labels(labels: Tensor, *, folds: int = 5) -> None:
    """Raise an :class:`OptionError` if labels cannot be cross-validated."""
    if labels.ndim != 1 or labels.is_floating_point():
        raise OptionError(f"`labels` must be one integer per text, but got {tuple(labels.shape)} of {labels.dtype}.")
    check_count("folds", folds, minimum=2)
    if len(labels) < 2 * folds:
        raise OptionError(
            f"`labels` must be at least {2 * folds} for {folds} folds, but there are {len(labels)}: label more texts."
        )
    usable = int((torch.unique(labels, return_counts=True)[1] > 1).sum())
    if usable < 2:
        raise OptionError(
            "`labels` must have 2 classes or more with at least 2 texts each, "
            f"but {len(labels)} labels have {pluralize(usable, 'such class', 'such classes')}: label more."
        )


def all_alike(vectors: Tensor, keys: Sequence[str]) -> Tensor:
    """Return for each layer True if all rows have the same vector, such as the last token of a template at layer 0.

    Args:
        vectors: shape ``(L, N, D)``.
        keys: keys of the N rows; the result is False if all are equal.
    """
    if len(set(keys)) < 2:
        return torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
    spread = (vectors.amax(dim=1) - vectors.amin(dim=1)).amax(dim=1)
    return spread <= _ROUNDING * vectors.abs().amax(dim=(1, 2))
