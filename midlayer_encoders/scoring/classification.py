"""Classification: logistic regressions on a few examples of each class, averaged over draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.scoring.logistic import logistic_regressions


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

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the mean score of the classifiers at each layer, shape ``(L,)``."""
        total = vectors.new_zeros(len(vectors), dtype=torch.float64)
        for group in self._groups():
            predicted = self.predictions(vectors, group)
            labels = torch.stack([data.test_labels for data in group]).to(predicted.device)
            total += self._measured(labels, predicted).sum(dim=1)
        return total / len(self.data)

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

    def _groups(self) -> list[list[ClassifierData]]:
        """Return classifiers that can be trained at once."""
        groups: dict[Any, list[ClassifierData]] = {}
        for data in self.data:
            classes = tuple(torch.unique(data.train_labels).tolist())
            groups.setdefault((len(data.train), classes, tuple(data.test.tolist())), []).append(data)
        return list(groups.values())

    def _measured(self, labels: Tensor, predicted: Tensor) -> Tensor:
        """Return the score of each classifier, shape ``(L, E)``."""
        if self.measure is None:
            return (predicted == labels).double().mean(dim=2)
        values = [
            [self.measure(y.numpy(), x.numpy()) for x, y in zip(layer, labels.cpu(), strict=True)]
            for layer in predicted.cpu()
        ]
        return torch.tensor(values, dtype=torch.float64, device=predicted.device)
