"""Alpha-ReQ: the decay rate of the spectrum of the texts' covariance."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._layer_metric import check_at_least
from midlayer_encoders.metrics._row_metric import Moments, RowMetric, number_of_rows
from midlayer_encoders.spectra import Method, eigenvalues


def alpha_req(
    embeddings: Tensor,
    *,
    first: int = 3,
    last: int = 100,
    weighted: bool = True,
    center: bool = True,
    method: Method = "exact",
) -> Tensor:
    r"""Return the exponent of the power law of the covariance's eigenvalues.

    .. math::
        \lambda_i \propto i^{-\alpha}: \quad
        (\alpha, c) = \arg\min \sum_{i=\text{first}}^{\text{last}} w_i\, (\log \lambda_i - c + \alpha \log i)^2

    with weights :math:`w_i = 1 / i`, which account for the growing density of ranks on a log axis (Stringer et al.,
    2019; Agrawal et al., 2022), or all equal.

    Args:
        embeddings: one row per text, shape ``(N, D)``.
        first: first rank of the fit, from 1; the largest few eigenvalues rarely follow the law.
        last: last rank of the fit, included; lower if the covariance has fewer eigenvalues above rounding.
        weighted: weigh rank i by 1 / i.
        center: subtract the mean of the rows.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`; ``"fast"`` loses the small ones.

    Returns:
        Scalar, ``>= 0``: ``0`` for a flat spectrum, ``1`` at the edge of smooth codes, large for few directions. NaN
        if the rows hold NaN or infinity.

    Raises:
        TooFewTextsError: the covariance has fewer than two eigenvalues in the range of the fit.

    Example:
        >>> alpha_req(torch.diag(torch.arange(1.0, 9.0) ** -0.5), center=False)  # eigenvalues 1, 1/2, ..., 1/8
        tensor(1.0000)
    """
    _check_range(first, last)
    slope = partial(_slope, first=first, last=last, weighted=weighted, method=method)
    return number_of_rows(embeddings, slope, center=center)


def _slope(moments: Moments, *, first: int, last: int, weighted: bool, method: Method) -> Tensor:
    values = eigenvalues(moments.matrix, method=method, check=False)
    slopes = [_slope_of_one(spectrum, first, last, weighted) for spectrum in values.reshape(-1, values.shape[-1])]
    return torch.stack(slopes).reshape(values.shape[:-1])


def _slope_of_one(values: Tensor, first: int, last: int, weighted: bool) -> Tensor:
    """Return the slope of one spectrum, a scalar; NaN if the spectrum is NaN."""
    if torch.isnan(values[0]):
        return values[0]
    # Rows are rounded to float32, so a direction without variance has the square of that rounding, not 0.
    rounding = values[0] * len(values) * torch.finfo(torch.float32).eps ** 2
    values = values[values > rounding][first - 1 : last]
    check_at_least(2, len(values), f"Eigenvalues above rounding from rank {first} to {last}")
    rank = torch.arange(first, first + len(values), dtype=values.dtype, device=values.device)
    weight = 1 / rank if weighted else torch.ones_like(rank)
    x, y = (axis - (weight * axis).sum() / weight.sum() for axis in (-rank.log(), values.log()))
    return (weight * x * y).sum() / (weight * x * x).sum()


def _check_range(first: int, last: int) -> None:
    if not 1 <= first < last:
        raise OptionError(f"`first` and `last` must be ranks with 1 <= first < last, but got {first} and {last}.")


class AlphaReQ(RowMetric, function=alpha_req, check=_check_range, number=_slope):
    """:func:`alpha_req` of all texts, per layer; exact, see :class:`RowMetric`. Options are those of the function."""
