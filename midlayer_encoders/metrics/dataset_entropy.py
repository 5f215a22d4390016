"""Dataset entropy: how many directions the texts of a dataset spread over."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from midlayer_encoders.metrics._row_metric import RowMetric, of_rows
from midlayer_encoders.metrics.matrix_entropy import Normalization, entropy_of, entropy_of_moments
from midlayer_encoders.spectra import Method


def dataset_entropy(
    embeddings: Tensor,
    alpha: float = 1.0,
    *,
    normalization: Normalization = "raw",
    center: bool = False,
    unit: bool = False,
    method: Method = "auto",
) -> Tensor:
    r"""Return the matrix entropy of one vector per text, in nats.

    .. math::
        S_\alpha(\bar Z), \qquad \bar z_i = \text{the pooled states of text } i

    with :math:`S_\alpha` of :func:`matrix_entropy`.

    Args:
        embeddings: one row per text, shape ``(N, D)``.
        alpha: order, ``> 0``.
        normalization: see :func:`matrix_entropy`.
        center: subtract the mean of the rows, after ``unit``.
        unit: scale each row to unit length.
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, between ``0`` and ``log(min(N, D))`` when raw. ``0`` for one text and for texts that are all the same.
        NaN where the rows hold NaN or infinity.

    Example:
        >>> import torch
        >>> dataset_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
        tensor(0.6931)
    """
    entropy = partial(entropy_of_moments, entropy=entropy_of(alpha, normalization, method))
    return of_rows(embeddings, entropy, center=center, unit=unit)


class DatasetEntropy(RowMetric):
    """:func:`dataset_entropy` of all texts, per layer; exact, see :class:`RowMetric` for what is kept.

    Options are those of the function; ``layers`` and ``torchmetrics_options`` as in :class:`LayerMetric`.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        alpha: float = 1.0,
        normalization: Normalization = "raw",
        method: Method = "auto",
        **options: Any,
    ) -> None:
        entropy = partial(entropy_of_moments, entropy=entropy_of(alpha, normalization, method))
        super().__init__(layers, entropy, **options)
