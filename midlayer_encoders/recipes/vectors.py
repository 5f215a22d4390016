"""Transformations of pooled vectors: centering, whitening and filtering, as one linear map."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes.recipe import SMALLEST_SAMPLE

LEFT_OUT = (0.02, 0.25)
"""Fractions of the largest and of the smallest singular directions of the output embeddings that are left out."""


def middle_directions(embeddings: Tensor, left_out: tuple[float, float] = LEFT_OUT) -> Tensor:
    r"""Return the projection onto the middle right singular vectors of output embeddings, shape ``(D, D)``.

    .. math::
        W = U \operatorname{diag}(s) V^\top, \qquad P = V_{a:b} V_{a:b}^\top

    The largest directions separate frequent from rare tokens; the smallest carry little (EmbedFilter, arXiv
    2606.07502).

    Args:
        embeddings: one row for each token, shape ``(T, D)``.
        left_out: fractions of the largest and of the smallest directions to leave out.
    """
    rows = embeddings.double()
    values, vectors = torch.linalg.eigh(rows.mT @ rows)  # ascending
    largest = math.ceil(left_out[0] * len(values))
    smallest = int(left_out[1] * len(values))
    middle = vectors[:, smallest : len(values) - largest]
    projection: Tensor = middle @ middle.mT
    return projection


def vector_map(
    vectors: Tensor | None, *, width: int, whiten: bool = False, projection: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return the matrix and the offset that filter, center and whiten a vector, in that order.

    .. math::
        y = S\,(P x - P \bar x), \qquad S = \bigl((1 - \lambda)\,\Sigma + \lambda \tfrac{\operatorname{tr} \Sigma}{D}
        I\bigr)^{-1/2} \text{ or } I

    with Ledoit and Wolf's :math:`\lambda`.

    Args:
        vectors: vectors of sample texts, shape ``(N, D)``; ``None`` for no centering.
        width: number of dimensions D.
        whiten: whether to scale directions.
        projection: a filter, shape ``(D, D)``.

    Returns:
        Shapes ``(D, D)`` and ``(D,)``, float64.
    """
    matrix = torch.eye(width, dtype=torch.float64) if projection is None else projection.double().cpu()
    if vectors is None:
        return matrix, torch.zeros(width, dtype=torch.float64)
    if len(vectors) < SMALLEST_SAMPLE:
        raise OptionError(
            f"`center` must be at least {SMALLEST_SAMPLE} texts, a few hundred better, but got {len(vectors)}."
        )
    filtered = vectors.double().cpu() @ matrix.mT
    if whiten:
        matrix = _whitening(filtered) @ matrix
    return matrix, -(matrix @ vectors.double().cpu().mean(dim=0))


def _whitening(vectors: Tensor) -> Tensor:
    """Return the inverse square root of the shrunk covariance, scaled to keep the mean length of vectors."""
    from sklearn.covariance import ledoit_wolf

    covariance, _ = ledoit_wolf(vectors.numpy())
    values, directions = torch.linalg.eigh(torch.from_numpy(covariance))
    scales = values.clamp(min=values.max() * 1e-9).rsqrt() * values.mean().sqrt()
    matrix: Tensor = (directions * scales) @ directions.mT
    return matrix
