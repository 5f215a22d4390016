"""Semantic textual similarity: how well the similarities of pairs follow the wanted ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from midlayer_encoders.scoring.ranks import correlation, ranks
from midlayer_encoders.scoring.similarity import pair_similarities


def sts_scores(
    vectors: Tensor,
    first: Tensor,
    second: Tensor,
    wanted: Tensor,
    *,
    score: str = "cosine_spearman",
    similarity: str = "cosine",
) -> Tensor:
    """Return how the pairs' similarities correlate with the wanted ones at each layer; NaN where they are constant.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        first: row of the first of each of P pairs.
        second: row of the second.
        wanted: similarity of each pair, shape ``(P,)``.
        score: mteb's name of it: ``spearman`` or ``pearson``, after ``cosine_``, ``manhattan_`` or ``euclidean_``, or
            alone for the encoder's own similarity.
        similarity: the encoder's own.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> first, second, wanted = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), torch.tensor([5.0, 1.0, 0.0])
        >>> sts_scores(vectors, first, second, wanted)
        tensor([0.5000], dtype=torch.float64)
    """
    measure, _, kind = score.rpartition("_")
    found = pair_similarities(vectors, first, second, measure=measure or "similarity", similarity=similarity)
    wanted = wanted.to(vectors.device).double()
    return correlation(ranks(found), ranks(wanted)) if kind == "spearman" else correlation(found, wanted)


@dataclass(frozen=True)
class StsPairs:
    """The pairs of a task, and what is asked of them: arguments of :func:`sts_scores`."""

    first: Tensor
    second: Tensor
    wanted: Tensor
    score: str
    similarity: str

    def scores(self, vectors: Tensor) -> Tensor:
        """Return one score for each layer, shape ``(L,)``."""
        return sts_scores(vectors, self.first, self.second, self.wanted, score=self.score, similarity=self.similarity)

    def numbers(self, rows: int, dim: int) -> int:
        """Return about how many numbers of four bytes a layer takes."""
        return rows * dim + 16 * len(self.first)
