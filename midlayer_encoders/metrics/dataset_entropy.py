"""Dataset entropy: how many directions the texts of a dataset spread over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from midlayer_encoders.metrics._base.moment_metric import Moments, row_moments
from midlayer_encoders.metrics._base.precision import result_dtype
from midlayer_encoders.metrics._base.row_metric import RowMetric
from midlayer_encoders.metrics.matrix_entropy import Normalization, check_entropy_options, entropy_of_gram
from midlayer_encoders.spectra import Method

__all__ = ["DatasetEntropy", "dataset_entropy"]


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
    check_entropy_options(alpha, normalization)
    moments = row_moments(embeddings, center=center, unit=unit)
    return _entropy(moments, alpha, normalization, method).to(result_dtype(embeddings))


def _entropy(moments: Moments, alpha: float, normalization: Normalization, method: Method) -> Tensor:
    count, width = moments.count, moments.width
    return entropy_of_gram(moments.matrix, None, count, width, alpha=alpha, normalization=normalization, method=method)


class DatasetEntropy(RowMetric):
    """:func:`dataset_entropy` of all texts, per layer; exact, see :class:`RowMetric` for what is kept.

    Args:
        layers: layer numbers that ``update`` will name.
        alpha: order of the entropy, ``> 0``.
        normalization: ``"raw"``, ``"maxEntropy"``, ``"logN"``, ``"logD"`` or ``"logNlogD"``.
        center: subtract the mean of the rows, after ``unit``.
        unit: scale each row to unit length.
        method: how eigenvalues are found.
        torchmetrics_options: torchmetrics' own.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        alpha: float = 1.0,
        normalization: Normalization = "raw",
        center: bool = False,
        unit: bool = False,
        method: Method = "auto",
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(layers, **torchmetrics_options)
        check_entropy_options(alpha, normalization)
        self.alpha, self.normalization, self.method = alpha, normalization, method
        self.center, self.unit = center, unit

    def _of(self, moments: Moments) -> Tensor:
        return _entropy(moments, self.alpha, self.normalization, self.method)
