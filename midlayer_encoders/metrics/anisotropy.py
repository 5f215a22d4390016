"""Anisotropy: the mean cosine of different texts, or the variance share of one direction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._row_metric import Moments, RowMetric, number_of_rows
from midlayer_encoders.spectra import Method, eigenvalues
from midlayer_encoders.validation import check_choice

AnisotropyForm: TypeAlias = Literal["cosine", "spectral"]
"""Mean cosine of two different texts, or the first principal component's share of the variance."""


def anisotropy(embeddings: Tensor, *, form: AnisotropyForm = "cosine", method: Method = "auto") -> Tensor:
    r"""Return the mean cosine over all pairs of different texts, or the largest share of variance in one direction.

    .. math::
        \frac{1}{N(N-1)} \sum_{i \ne j} \cos(z_i, z_j)
        = \frac{\lVert \sum_i u_i \rVert^2 - \sum_i \lVert u_i \rVert^2}{N(N-1)}, \qquad u_i = z_i / \lVert z_i \rVert

    (Ethayarajh, 2019, over all pairs instead of a sample), or with ``form="spectral"``
    :math:`\lambda_1 / \sum_i \lambda_i` of the covariance (Razzhigaev et al., 2024).

    Args:
        embeddings: one row per text, shape ``(N, D)``, two texts or more.
        form: ``"cosine"`` or ``"spectral"``.
        method: eigenvalue method for ``"spectral"``, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar. Cosine: between ``-1 / (N - 1)`` and ``1``, ``0`` for random directions; a zero vector has cosine 0 with
        all others. Spectral: between ``1 / min(N - 1, D)`` and ``1``; ``0`` if all texts are equal. NaN if the rows
        hold NaN or infinity.

    Example:
        >>> anisotropy(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
        tensor(0.3333)
    """
    _check_form(form)
    if len(embeddings) < 2:
        raise OptionError(f"`embeddings` must be two or more rows, but got {len(embeddings)}.")
    number = partial(_anisotropy, form=form, method=method)
    return number_of_rows(embeddings, number, center=form == "spectral", unit=form == "cosine")


def _check_form(form: str) -> None:
    check_choice("form", form, get_args(AnisotropyForm))


def _anisotropy(moments: Moments, *, form: AnisotropyForm, method: Method) -> Tensor:
    if form == "cosine":
        pairs = moments.count * (moments.count - 1)
        squared_lengths = moments.matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        return (moments.total.square().sum(dim=-1) - squared_lengths) / pairs
    values = eigenvalues(moments.matrix, method=method, check=False)
    return values[..., 0] / values.sum(dim=-1).clamp(min=torch.finfo(values.dtype).tiny)


class Anisotropy(RowMetric, function=anisotropy, check=_check_form, number=_anisotropy):
    """:func:`anisotropy` of all texts, per layer; exact, see :class:`RowMetric`. Options are those of the function."""

    least = 2

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.center = self.options["form"] == "spectral"
        self.unit = not self.center
