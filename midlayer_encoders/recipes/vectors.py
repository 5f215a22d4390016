"""What is done to pooled vectors: centering, whitening and filtering, as one linear map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SMALLEST_SAMPLE", "middle_directions", "vector_map"]

SMALLEST_SAMPLE = 16  # texts: the mean of fewer is one of them as much as what all share
# Shares of the singular directions of the output embeddings that are left out, from the largest and from the smallest.
_LARGEST, _SMALLEST = 0.02, 0.25


def middle_directions(embeddings: Tensor) -> Tensor:
    r"""Return the projection onto the middle right singular vectors of output embeddings, shape ``(D, D)``.

    .. math::
        W = U \operatorname{diag}(s) V^\top, \qquad P = V_{a:b} V_{a:b}^\top

    The largest directions tell frequent tokens from rare ones, the smallest carry little (EmbedFilter, arXiv
    2606.07502).

    Args:
        embeddings: one row for each token, shape ``(T, D)``.
    """
    import torch

    rows = embeddings.double()
    values, vectors = torch.linalg.eigh(rows.mT @ rows)  # ascending
    width = len(values)
    kept = vectors[:, int(_SMALLEST * width) : width - max(int(_LARGEST * width), 1)]
    projection: Tensor = kept @ kept.mT
    return projection


def vector_map(
    vectors: Tensor | None, *, width: int, whiten: bool = False, projection: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return the matrix and the offset by which a vector is filtered, centered and whitened, in that order.

    .. math::
        y = S\,(P x - P \bar x), \qquad S = \bigl((1 - \lambda)\,\Sigma + \lambda \tfrac{\operatorname{tr} \Sigma}{D}
        I\bigr)^{-1/2} \text{ or } I

    with Ledoit and Wolf's :math:`\lambda`.

    Args:
        vectors: of texts like those to come, shape ``(N, D)``; ``None`` for no centering.
        width: number of dimensions D.
        whiten: whether directions are scaled.
        projection: a filter, shape ``(D, D)``.

    Returns:
        Shapes ``(D, D)`` and ``(D,)``, float64.
    """
    import torch

    matrix = torch.eye(width, dtype=torch.float64) if projection is None else projection.double().cpu()
    if vectors is None:
        return matrix, torch.zeros(width, dtype=torch.float64)
    if len(vectors) < SMALLEST_SAMPLE:
        raise OptionError(
            f"`center` must be at least {SMALLEST_SAMPLE} texts, a few hundred better, but got {len(vectors)}."
        )
    filtered = vectors.double().cpu() @ matrix.mT
    if whiten:
        matrix = _unspread(filtered) @ matrix
    return matrix, -(matrix @ vectors.double().cpu().mean(dim=0))


def _unspread(vectors: Tensor) -> Tensor:
    """Return the inverse square root of the shrunk covariance, scaled to keep the mean length of vectors."""
    import torch
    from sklearn.covariance import ledoit_wolf

    covariance, _ = ledoit_wolf(vectors.numpy())
    values, directions = torch.linalg.eigh(torch.from_numpy(covariance))
    scales = values.clamp(min=values.max() * 1e-9).rsqrt() * values.mean().sqrt()
    made: Tensor = (directions * scales) @ directions.mT
    return made
