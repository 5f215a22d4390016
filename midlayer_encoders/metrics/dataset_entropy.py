"""Dataset entropy: the matrix entropy of one vector per text."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from midlayer_encoders.metrics._row_metric import RowMetric, number_of_rows
from midlayer_encoders.metrics.matrix_entropy import Normalization, check_entropy_options, entropy_of_moments
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
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, between ``0`` and ``log(min(N, D))`` when raw. ``0`` for one text and for equal texts. NaN if the
        rows hold NaN or infinity.

    Example:
        >>> import torch
        >>> dataset_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
        tensor(0.6931)
    """
    check_entropy_options(alpha, normalization)
    entropy = partial(entropy_of_moments, alpha=alpha, normalization=normalization, method=method)
    return number_of_rows(embeddings, entropy, center=center, unit=unit)


class DatasetEntropy(RowMetric, function=dataset_entropy, check=check_entropy_options, number=entropy_of_moments):
    """:func:`dataset_entropy` of all texts, per layer; exact, see :class:`RowMetric`.

    Options are those of the function.
    """
