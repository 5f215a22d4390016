"""Read labeled examples from a folder of class folders or from a table, and split them for probing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.label_accuracy import label_folds

_FOLDS = 5  # one tests, one chooses the epoch, the others train


@dataclass(frozen=True)
class Split:
    """Positions of the examples that train, choose the epoch, and test, each a tensor in ascending order."""

    train: Tensor
    validation: Tensor
    test: Tensor


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
    least = 2 if num_test else 3
    for number, count in enumerate(labels[:num_train].bincount(minlength=len(names)).tolist()):
        if count < least:
            raise OptionError(
                f"`labels` must have at least {least} examples of each class, to train, choose and test, but "
                f"{names[number] if names else number!r} has {count}. Add examples, or leave the class out."
            )
    fold = label_folds(labels[:num_train], folds=_FOLDS, seed=seed)
    is_held_out = fold == 1 if num_test else fold <= 1
    test = positions[num_train:] if num_test else positions[fold == 0]
    return Split(positions[:num_train][~is_held_out], positions[:num_train][fold == 1], test)
