"""Classification: logistic regressions of a few examples of each class, the mean over draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.scoring.logistic import logistic_regressions


@dataclass(frozen=True)
class Experiment:
    """What one regression is fitted to and asked: rows and labels, labels from 0 to the number of classes less 1."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def predictions(
    vectors: Tensor, experiments: Sequence[Experiment], *, strength: float, max_iterations: int, tolerance: float
) -> Tensor:
    """Return the predicted label of every row asked, shape ``(L, E, T)``, for experiments of one shape and test.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        experiments: E of them, with as many rows and the same classes in each, and the same T rows asked.
        strength: scikit-learn's ``C``.
        max_iterations: scikit-learn's ``max_iter``.
        tolerance: scikit-learn's ``tol``.
    """
    device, layers = vectors.device, len(vectors)
    known = torch.unique(experiments[0].train_labels)  # classes without an example are never predicted
    if len(known) < 2:
        raise OptionError("A classification must have examples of at least two classes to learn from, but has one.")
    train = torch.stack([one.train for one in experiments]).to(device)
    labels = torch.searchsorted(known, torch.stack([one.train_labels for one in experiments])).to(device)
    weights, bias = logistic_regressions(
        vectors[:, train].flatten(0, 1), labels.repeat(layers, 1), classes=len(known), strength=strength,
        max_iterations=max_iterations, tolerance=tolerance,
    )  # fmt: skip
    weights, bias = (x.to(vectors.dtype).view(layers, -1, *x.shape[1:]) for x in (weights, bias))
    asked = vectors[:, experiments[0].test.to(device)]
    found = []
    for number in range(len(experiments)):
        logits = asked @ weights[:, number] + bias[:, number, None]
        found.append((logits[..., 0] > 0).long() if logits.shape[2] == 1 else logits.argmax(dim=2))
    chosen: Tensor = known.to(device)[torch.stack(found, dim=1)]
    return chosen


def classification_scores(vectors: Tensor, experiments: Sequence[Experiment], **how: Any) -> Tensor:
    """Return the share of right predictions at each layer, the mean over experiments.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        experiments: any number, not necessarily of one shape.
        how: ``strength``, ``max_iterations`` and ``tolerance`` of :func:`predictions`.
    """
    return Classifiers(tuple(experiments), **how).scores(vectors)


@dataclass(frozen=True)
class Classifiers:
    """The experiments of a task, and how they are scored: by accuracy, or by ``measure`` of labels and predictions."""

    experiments: tuple[Experiment, ...]
    strength: float = 1.0
    max_iterations: int = 100
    tolerance: float = 1e-4
    measure: Callable[[Any, Any], float] | None = None

    def scores(self, vectors: Tensor) -> Tensor:
        """Return one score for each layer, shape ``(L,)``."""
        total = vectors.new_zeros(len(vectors), dtype=torch.float64)
        for group in self._groups():
            found = predictions(
                vectors, group, strength=self.strength, max_iterations=self.max_iterations, tolerance=self.tolerance
            )
            wanted = torch.stack([one.test_labels for one in group]).to(found.device)
            total += self._measured(found, wanted).sum(dim=1)
        return total / len(self.experiments)

    def numbers(self, rows: int, dim: int) -> int:
        """Return about how many numbers of four bytes a layer takes."""
        one = self.experiments[0]
        size, classes = len(one.train), len(torch.unique(one.train_labels))
        inner = size if 2 * size <= dim else dim
        # In eight bytes: the rows, the memory of L-BFGS and what an evaluation makes.
        solving = 2 * len(self.experiments) * (size * dim + 28 * (inner + 1) * classes + 6 * size * classes)
        return rows * dim + solving + len(one.test) * (dim + 2 * classes)

    def _groups(self) -> list[list[Experiment]]:
        """Return experiments that can be fitted side by side."""
        groups: dict[Any, list[Experiment]] = {}
        for one in self.experiments:
            classes = tuple(torch.unique(one.train_labels).tolist())
            groups.setdefault((len(one.train), classes, tuple(one.test.tolist())), []).append(one)
        return list(groups.values())

    def _measured(self, found: Tensor, wanted: Tensor) -> Tensor:
        if self.measure is None:
            return (found == wanted).double().mean(dim=2)
        values = [
            [self.measure(y.numpy(), x.numpy()) for x, y in zip(layer, wanted.cpu(), strict=True)]
            for layer in found.cpu()
        ]
        return torch.tensor(values, dtype=torch.float64, device=found.device)
