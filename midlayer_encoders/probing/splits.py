"""Split labeled examples for probing, and judge the accuracy of a probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.selection.ridge import label_folds

_FOLDS = 5  # one tests, one chooses the epoch, the others train


@dataclass(frozen=True)
class Split:
    """Positions of the examples that train, choose the epoch, and test, each a tensor in ascending order."""

    train: Tensor
    validation: Tensor
    test: Tensor


def wilson(right: int, count: int, *, z: float = 1.959964) -> tuple[float, float]:
    r"""Return the Wilson interval of a proportion: ``right`` of ``count``, 95 % by default.

    .. math::
        \frac{p + z^2/2n \pm z \sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}

    Unlike the normal approximation it stays within 0 and 1, and has a width if all or none are right.

    Example:
        >>> [round(bound, 3) for bound in wilson(81, 100)], [round(bound, 3) for bound in wilson(10, 10)]
        ([0.722, 0.875], [0.722, 1.0])
    """
    if not 0 <= right <= count or count < 1:
        raise OptionError(f"`right` must be between 0 and `count`, and `count` at least 1, but got {right} of {count}.")
    share = right / count
    spread = z * z / count
    middle = (share + spread / 2) / (1 + spread)
    reach = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def split_examples(labels: Tensor, *, names: Sequence[str] = (), num_test: int = 0, seed: int = 0) -> Split:
    """Return which examples train, choose the epoch and test; every class is spread over the three evenly.

    Args:
        labels: classes from ``0``, shape ``(N,)``.
        names: of the classes, for error messages.
        num_test: number of test examples at the end; ``0`` tests on a fifth of each class.
        seed: for the split.

    Example:
        >>> split = split_examples(torch.arange(20) % 2)
        >>> len(split.train), len(split.validation), len(split.test)
        (12, 4, 4)
    """
    positions = torch.arange(len(labels))
    num_train = len(labels) - num_test
    _check_classes(labels[:num_train], names, least=2 if num_test else 3)
    fold = label_folds(labels[:num_train], folds=_FOLDS, seed=seed)
    is_held_out = fold == 1 if num_test else fold <= 1
    test = positions[num_train:] if num_test else positions[fold == 0]
    return Split(positions[:num_train][~is_held_out], positions[:num_train][fold == 1], test)


def chance_level(labels: Tensor, split: Split) -> float:
    """Return the accuracy of always predicting the most common class of the test examples.

    The most common class of the training examples would be arbitrary if classes are balanced there, and could be rare
    among the test examples, which would understate chance.

    Example:
        >>> labels = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1])
        >>> chance_level(labels, Split(torch.arange(2), torch.arange(2, 4), torch.arange(4, 8)))
        0.75
    """
    test_labels = labels[split.test]
    return float(test_labels.bincount().max()) / len(test_labels)


def _check_classes(labels: Tensor, names: Sequence[str], *, least: int) -> None:
    counts = labels.bincount(minlength=len(names)).tolist()
    if len(counts) < 2:
        name = f", {names[0]!r}" if names else ""
        raise OptionError(
            f"`labels` must name at least 2 classes, but {len(labels)} examples have {len(counts)}{name}."
        )
    for number, count in enumerate(counts):
        if count < least:
            raise OptionError(
                f"`labels` must have at least {least} examples of each class, to train, choose and test, but "
                f"{names[number] if names else number!r} has {count}. Add examples, or leave the class out."
            )
    if len(labels) < 2 * _FOLDS:
        raise OptionError(f"`labels` must be at least {2 * _FOLDS} examples, but there are {len(labels)}.")
