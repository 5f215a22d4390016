"""Pair classification: how well similarity tells pairs that belong together from others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midlayer_encoders.scoring.ranks import average_precision
from midlayer_encoders.scoring.similarity import MEASURES, pair_similarities


def pair_scores(
    vectors: Tensor, first: Tensor, second: Tensor, labels: Tensor, *, score: str = "max_ap", similarity: str = "cosine"
) -> Tensor:
    """Return the average precision of the pairs by similarity at each layer.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        first: row of the first of each of P pairs.
        second: row of the second.
        labels: 1 where a pair belongs together, shape ``(P,)``.
        score: mteb's name of it: ``max_ap`` for the best of all measures, or that of one, such as ``dot_ap``.
        similarity: the encoder's own, which ``similarity_ap`` means.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> pair_scores(vectors, torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([1, 0]))
        tensor([1.], dtype=torch.float64)
    """
    measures = ("similarity", *MEASURES) if score == "max_ap" else (score.removesuffix("_ap"),)
    found = [
        average_precision(pair_similarities(vectors, first, second, measure=one, similarity=similarity), labels == 1)
        for one in measures
    ]
    return torch.stack(found).amax(dim=0)


@dataclass(frozen=True)
class LabelledPairs:
    """The pairs of a task, and what is asked of them: arguments of :func:`pair_scores`."""

    first: Tensor
    second: Tensor
    labels: Tensor
    score: str
    similarity: str

    def scores(self, vectors: Tensor) -> Tensor:
        """Return one score for each layer, shape ``(L,)``."""
        return pair_scores(vectors, self.first, self.second, self.labels, score=self.score, similarity=self.similarity)

    def numbers(self, rows: int, dim: int) -> int:
        """Return about how many numbers of four bytes a layer takes."""
        return rows * dim + 16 * len(self.first)
