"""How alike the two vectors of a pair are, at every layer, by each of the measures that mteb compares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sentence_transformers.util import SimilarityFunction
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK = 1 << 24  # numbers of a block of pairs: 64 MiB


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    # As scikit-learn computes it in float32, so that what is equal there is equal here.
    return 1 - 0.5 * (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(dim=-1)


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": _cosine,
    "manhattan": lambda first, second: -(first - second).abs().sum(dim=-1),
    "euclidean": lambda first, second: -(first - second).square().sum(dim=-1).sqrt(),
    "dot": lambda first, second: (first * second).sum(dim=-1),
}
"""By mteb's name, from vectors ``(*, D)`` to numbers ``(*)``; larger means more alike."""


def pair_similarities(
    vectors: Tensor, first: Tensor, second: Tensor, *, measure: str, similarity: str = "cosine"
) -> Tensor:
    """Return how alike the vectors of each pair are, shape ``(L, P)``.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        first: row of the first of each of P pairs.
        second: row of the second.
        measure: one of :data:`MEASURES`, or ``"similarity"`` for the encoder's own.
        similarity: the encoder's own, as in sentence-transformers' ``similarity_fn_name``.
    """
    own = SimilarityFunction.to_similarity_pairwise_fn(similarity)
    size = max(_BLOCK // (len(vectors) * vectors.shape[2]), 1)
    blocks = []
    for start in range(0, len(first), size):
        one, other = (x[start : start + size].to(vectors.device) for x in (first, second))
        a, b = vectors[:, one], vectors[:, other]
        if measure == "similarity":
            blocks.append(own(a.flatten(0, 1), b.flatten(0, 1)).view(a.shape[:2]))
        else:
            blocks.append(MEASURES[measure](a, b))
    return torch.cat(blocks, dim=1)
