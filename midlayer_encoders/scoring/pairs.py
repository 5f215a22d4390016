"""Tasks on pairs: semantic textual similarity and pair classification, for all layers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sentence_transformers.util import SimilarityFunction
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK = 1 << 24  # numbers of a block of pairs: 64 MiB


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    # The formula that scikit-learn uses in float32, so that equal values there are equal here.
    return 1 - 0.5 * (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(dim=-1)


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": _cosine,
    "manhattan": lambda first, second: -(first - second).abs().sum(dim=-1),
    "euclidean": lambda first, second: -(first - second).square().sum(dim=-1).sqrt(),
    "dot": lambda first, second: (first * second).sum(dim=-1),
}
"""Similarities by mteb's name, from vectors ``(*, D)`` to numbers ``(*)``; larger means more similar."""


def pair_similarities(
    vectors: Tensor, first: Tensor, second: Tensor, *, measure: str, similarity: str = "cosine"
) -> Tensor:
    """Return the similarity of each pair at each layer, shape ``(L, P)``.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        first: row of the first element of each of P pairs.
        second: row of the second element.
        measure: one of :data:`MEASURES`, or ``"similarity"`` for the encoder's similarity.
        similarity: the encoder's similarity, as in sentence-transformers' ``similarity_fn_name``.
    """
    function = MEASURES.get(measure) or SimilarityFunction.to_similarity_pairwise_fn(similarity)
    size = max(_BLOCK // (len(vectors) * vectors.shape[2]), 1)
    blocks = []
    for first_rows, second_rows in zip(torch.split(first, size), torch.split(second, size), strict=True):
        x = vectors[:, first_rows.to(vectors.device)]
        y = vectors[:, second_rows.to(vectors.device)]
        blocks.append(function(x.flatten(0, 1), y.flatten(0, 1)).view(x.shape[:2]))
    return torch.cat(blocks, dim=1)


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value in its row, from 1; equal values share the mean rank, and NaN makes a row NaN.

    Example:
        >>> ranks(torch.tensor([[10.0, 30.0, 10.0, 20.0]]))
        tensor([[1.5000, 4.0000, 1.5000, 3.0000]], dtype=torch.float64)
    """
    values = values.contiguous()
    ordered = values.sort(dim=-1).values.contiguous()
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    mean_ranks = (below + up_to + 1).double() / 2
    return mean_ranks.masked_fill(values.isnan().any(dim=-1, keepdim=True), torch.nan)


def correlation(x: Tensor, y: Tensor) -> Tensor:
    """Return the Pearson correlation of the rows of two tensors; NaN if a row is constant.

    Example:
        >>> correlation(torch.tensor([[1.0, 2.0, 2.0], [1.0, 1.0, 1.0]]), torch.tensor([2.0, 4.0, 6.0]))
        tensor([0.8660,    nan], dtype=torch.float64)
    """
    constant = (x == x[..., :1]).all(dim=-1) | (y == y[..., :1]).all(dim=-1)
    x = x.double() - x.double().mean(dim=-1, keepdim=True)
    y = y.double() - y.double().mean(dim=-1, keepdim=True)
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    return torch.where(constant, torch.nan, (x * y).sum(dim=-1) / lengths)


def average_precision(scores: Tensor, positive: Tensor) -> Tensor:
    r"""Return the average precision of each row.

    .. math::
        \sum_k (R_k - R_{k-1}) P_k

    over the distinct scores in descending order, with recall :math:`R` and precision :math:`P` at each of them.

    Args:
        scores: shape ``(*, N)``.
        positive: bool, shape ``(N,)``; the result is 0 if none is.

    Example:
        >>> average_precision(torch.tensor([[0.9, 0.8, 0.7, 0.6]]), torch.tensor([True, False, True, False]))
        tensor([0.8333], dtype=torch.float64)
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    hits = positive.to(scores.device)[order].double().cumsum(dim=-1)
    # Equal scores share one threshold, so each uses the counts at the last of them.
    last = torch.searchsorted(-ordered.contiguous(), -ordered.contiguous(), right=True) - 1
    precision = hits.gather(-1, last) / (last + 1)
    recalled = hits.diff(dim=-1, prepend=torch.zeros_like(hits[..., :1]))
    return (precision * recalled).sum(dim=-1) / hits[..., -1].clamp(min=1)


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a task.

    Attributes:
        first: row of the first element of each of P pairs.
        second: row of the second element.
        targets: gold similarity, or label (1 for a positive pair), shape ``(P,)``.
        score: mteb's name of the score.
        similarity: the encoder's similarity.
    """

    first: Tensor
    second: Tensor
    targets: Tensor
    score: str
    similarity: str = "cosine"

    def similarities(self, vectors: Tensor, measure: str) -> Tensor:
        """Return the similarity of each pair at each layer, shape ``(L, P)``."""
        return pair_similarities(vectors, self.first, self.second, measure=measure, similarity=self.similarity)

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        return rows * dim + 16 * len(self.first)


@dataclass(frozen=True)
class StsPairs(_Pairs):
    """Pairs with gold similarities.

    ``score`` is ``spearman`` or ``pearson``, after ``cosine_``, ``manhattan_`` or ``euclidean_``, or alone for the
    encoder's similarity.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> first, second, gold = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), torch.tensor([5.0, 1.0, 0.0])
        >>> StsPairs(first, second, gold, "cosine_spearman").scores(vectors)
        tensor([0.5000], dtype=torch.float64)
    """

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the correlation with the gold similarities at each layer, shape ``(L,)``; NaN if one is constant."""
        measure, _, kind = self.score.rpartition("_")
        similarities = self.similarities(vectors, measure or "similarity")
        targets = self.targets.to(vectors.device).double()
        if kind == "spearman":
            return correlation(ranks(similarities), ranks(targets))
        return correlation(similarities, targets)


@dataclass(frozen=True)
class LabeledPairs(_Pairs):
    """Pairs with labels.

    ``score`` is ``max_ap`` for the best of all measures, or the name of one, such as ``dot_ap``; ``similarity_ap`` is
    the encoder's similarity.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> pairs = LabeledPairs(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([1, 0]), "max_ap")
        >>> pairs.scores(vectors)
        tensor([1.], dtype=torch.float64)
    """

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the average precision at each layer, shape ``(L,)``."""
        measures = ("similarity", *MEASURES) if self.score == "max_ap" else (self.score.removesuffix("_ap"),)
        positive = self.targets == 1
        precisions = [average_precision(self.similarities(vectors, measure), positive) for measure in measures]
        return torch.stack(precisions).amax(dim=0)
