"""How well each layer's vectors tell labels apart: cross-validated ridge, all layers at once, in closed form."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.validation import check_list, lone_surrogate

__all__ = [
    "check_labels",
    "class_numbers",
    "equal_steps",
    "label_folds",
    "label_list",
    "resampled_means",
    "ridge_correct",
    "ridge_predicted",
]

_PENALTIES = tuple(10.0**power for power in range(-4, 3))
"""Tried for each layer and fold, in units of the mean squared length of the training rows."""


def ridge_correct(vectors: Tensor, labels: Tensor, *, folds: int = 5, seed: int = 0) -> Tensor:
    r"""Return whether each layer labels each text rightly when it was not in the training folds.

    .. math::
        \hat y_i = \arg\max_c\, (x_i - \bar x)^\top (X^\top X + \lambda I)^{-1} X^\top Y_c + \bar Y_c

    over unit-length rows, centered on the training texts, with one column of Y per class. The penalty is chosen inside
    each training set, by the squared error of leaving one text out, which has a closed form too.

    Args:
        vectors: one row per layer and text, shape ``(L, N, D)``.
        labels: integers, shape ``(N,)``; a class of one text can never be right, and lowers every layer alike.
        folds: number of parts, of which each is left out once; every class is spread over them evenly.
        seed: of the folds.

    Returns:
        Shape ``(L, N)``, bool; its mean over texts is the accuracy of each layer.

    Example:
        >>> labels = torch.arange(12) % 3
        >>> good, constant = torch.eye(3)[labels], torch.ones(12, 3)
        >>> ridge_correct(torch.stack([good, constant]), labels).double().mean(dim=1)[0]
        tensor(1., dtype=torch.float64)
    """
    labels = labels.to(vectors.device)
    _check_vectors(vectors, labels)
    fold = label_folds(labels, folds=folds, seed=seed)
    rows = torch.nn.functional.normalize(vectors.double(), dim=-1)
    classes = torch.unique(labels, return_inverse=True)[1]
    targets = torch.nn.functional.one_hot(classes).double()
    right = torch.zeros(vectors.shape[:2], dtype=torch.bool, device=vectors.device)
    for left_out in range(folds):
        test = fold == left_out
        found = _predicted(rows[:, ~test], targets[~test], rows[:, test])
        right[:, test] = found == classes[test]
    return right


def ridge_predicted(known: Tensor, classes: Tensor, asked: Tensor) -> Tensor:
    """Return the class of each row of ``asked`` ``(L, M, D)``, shape ``(L, M)``, by the ridge of ``ridge_correct``.

    Args:
        known: rows to train on, shape ``(L, N, D)``.
        classes: of them, numbers from ``0``, shape ``(N,)``.
        asked: rows to name the class of.
    """
    rows, test = (torch.nn.functional.normalize(one.double(), dim=-1) for one in (known, asked))
    return _predicted(rows, torch.nn.functional.one_hot(classes.to(rows.device)).double(), test)


def equal_steps(count: int, most: int) -> list[int]:
    """Return places at equal steps: files are often sorted.

    Example:
        >>> equal_steps(10, 4)
        [0, 2, 5, 7]
    """
    return list(range(count)) if count <= most else [count * place // most for place in range(most)]


def label_list(argument: str, labels: Any) -> list[Any]:
    """Return the class of each example as a list, ``None`` where it has none, or raise which cannot be a class."""
    numbers = ((label, getattr(label, "ndim", 1) == 0) for label in check_list(argument, labels, "labels", minimum=0))
    found = [label.item() if scalar else label for label, scalar in numbers]  # of NumPy and torch
    for place, label in enumerate(found):
        if label is not None and not isinstance(label, str | int | float):
            raise OptionError(
                f"`{argument}[{place}]` must be the name or the number of a class, but got {short_repr(label)}."
            )
        if label != label or (isinstance(label, str) and lone_surrogate(label) is not None):
            raise OptionError(f"`{argument}[{place}]` must be a class that equals itself, but got {short_repr(label)}.")
    return found


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
    """Return the fold of each text, ``0`` to ``folds - 1``, shape ``(N,)``: each class is dealt out evenly.

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


def resampled_means(right: Tensor, *, resamples: int = 1000, seed: int = 0) -> Tensor:
    """Return the accuracy of every layer on texts drawn with replacement, the same ones for all layers.

    Quantiles over the first axis are intervals; differences between columns compare layers on the same texts.

    Args:
        right: whether each text was labeled rightly, or any number per text, shape ``(L, N)``.
        resamples: number of draws, R.
        seed: of the draws.

    Returns:
        Shape ``(R, L)``, float64.

    Example:
        >>> resampled_means(torch.ones(2, 5, dtype=torch.bool), resamples=3)[0]
        tensor([1., 1.], dtype=torch.float64)
    """
    count = right.shape[1]
    drawn = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
    times = torch.zeros(resamples, count, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(drawn.shape).double())
    return times.to(right.device) @ right.double().mT / count


def check_labels(labels: Tensor, *, folds: int = 5) -> None:
    """Raise an :class:`OptionError` unless labels can be cross-validated."""
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
            f"but {len(labels)} labels have {usable} such class{'es' if usable != 1 else ''}: label texts of another."
        )


def _check_vectors(vectors: Tensor, labels: Tensor) -> None:
    if vectors.ndim != 3 or not vectors.is_floating_point() or vectors.shape[1:2] != labels.shape:
        raise OptionError(
            "`vectors` must be (L, N, D) of floats with one of the N `labels` each, "
            f"but got {tuple(vectors.shape)} of {vectors.dtype} and {tuple(labels.shape)}."
        )


def _predicted(rows: Tensor, targets: Tensor, test: Tensor) -> Tensor:
    """Return the class of each test row, ``(L, M)``, after training on rows ``(L, N, D)`` with targets ``(N, C)``."""
    middle, level = rows.mean(dim=1, keepdim=True), targets.mean(dim=0)
    rows, test, wanted = rows - middle, test - middle, targets - level
    left, sizes, right = _decomposed(rows)
    shares = _shares(sizes, rows.square().sum(dim=(1, 2)) / rows.shape[1])
    coded = left.mT @ wanted  # (L, R, C)
    best = _least_error(left, shares, coded, wanted)
    chosen = shares[best, torch.arange(len(rows), device=rows.device)] / sizes.sqrt()  # (L, R)
    found: Tensor = ((test @ right) @ (chosen.unsqueeze(-1) * coded) + level).argmax(dim=-1)
    return found


def _decomposed(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors ``(L, N, R)``, squared singular values ``(L, R)``, right vectors ``(L, D, R)`` of rows."""
    wide = rows.shape[1] <= rows.shape[2]  # eigenvalues of the smaller Gram matrix cost least
    sizes, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    # What is rounding counts as an endless direction of no use: its share below is zero.
    largest = sizes.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    real = sizes > 1e-12 * largest
    sizes = torch.where(real, sizes, torch.inf)
    other = (rows.mT if wide else rows) @ vectors / sizes.sqrt().unsqueeze(-2)
    return (vectors, sizes, other) if wide else (other, sizes, vectors)


def _shares(sizes: Tensor, scale: Tensor) -> Tensor:
    """Return how much of each direction is kept under each penalty, shape ``(P, L, R)``."""
    penalties = torch.tensor(_PENALTIES, dtype=sizes.dtype, device=sizes.device)[:, None, None] * scale[:, None]
    shares = sizes / (sizes + penalties)
    return torch.where(sizes.isinf(), 0.0, shares)


def _least_error(left: Tensor, shares: Tensor, coded: Tensor, wanted: Tensor) -> Tensor:
    """Return the penalty of each layer with the least squared error of leaving one text out, ``(L,)``."""
    errors = []
    for share in shares:
        fitted = left @ (share.unsqueeze(-1) * coded)
        lever = (left.square() * share.unsqueeze(-2)).sum(dim=-1) + 1 / len(wanted)
        errors.append(((wanted - fitted) / (1 - lever).clamp(min=1e-9).unsqueeze(-1)).square().sum(dim=(1, 2)))
    return torch.stack(errors).argmin(dim=0)
