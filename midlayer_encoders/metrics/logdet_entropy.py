"""Log-determinant entropy: the coding rate of the texts at a given precision."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._row_metric import Moments, RowMetric, number_of_rows
from midlayer_encoders.spectra import Method, eigenvalues


def logdet_entropy(
    embeddings: Tensor,
    *,
    epsilon: float = 0.5,
    center: bool = False,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the coding rate of one vector per text, in nats per text: a log-determinant entropy.

    .. math::
        \tfrac12 \log\det\Bigl(I + \frac{D}{N \epsilon^2}\, Z Z^\top\Bigr)

    the number of nats that coding a row up to a squared error of :math:`\epsilon^2` takes (Ma et al., 2007; Yu et al.,
    2020). It is defined for singular covariances, and small directions count little.

    Args:
        embeddings: one row per text, shape ``(N, D)``.
        epsilon: precision of the code, ``> 0``, in the units of the rows.
        center: subtract the mean of the rows, after ``unit``.
        unit: scale each row to unit length; without it the value grows with the scale of the states.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, ``>= 0``; for unit rows at most ``n / 2 * log(1 + D / (n * epsilon ** 2))`` with ``n = min(N, D)``.
        ``0`` if all rows are zero. NaN if they hold NaN or infinity.

    Example:
        >>> logdet_entropy(torch.eye(2), epsilon=1.0)  # log det of diag(2, 2), halved
        tensor(0.6931)
    """
    _check_epsilon(epsilon)
    return number_of_rows(embeddings, partial(_rate, epsilon=epsilon, method=method), center=center, unit=unit)


def _rate(moments: Moments, *, epsilon: float, method: Method) -> Tensor:
    values = eigenvalues(moments.matrix, method=method, check=False)
    return 0.5 * torch.log1p(values * moments.width / (moments.count.unsqueeze(-1) * epsilon**2)).sum(dim=-1)


def _check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise OptionError(f"`epsilon` must be greater than 0, but got {epsilon}.")


class LogdetEntropy(RowMetric, function=logdet_entropy, check=_check_epsilon, number=_rate):
    """:func:`logdet_entropy` of all texts, per layer; exact, see :class:`RowMetric`.

    Options are those of the function.
    """
