"""InfoNCE: the contrastive loss of two views of each text."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, precise, result_dtype, unit_rows
from midlayer_encoders.metrics._sample_metric import ViewMetric, check_pair
from midlayer_encoders.validation import check_choice

InfoNCEForm: TypeAlias = Literal["simclr", "one_way", "bound"]
"""Loss among all 2N views; from the first view among the N second ones; or ``log N`` minus the latter."""


def infonce(first: Tensor, second: Tensor, *, temperature: float = 0.1, form: InfoNCEForm = "simclr") -> Tensor:
    r"""Return the InfoNCE loss of two views of each text, in nats.

    .. math::
        -\frac{1}{2N} \sum_{i=1}^{2N} \log
        \frac{\exp(\cos(u_i, u_{i'}) / \tau)}{\sum_{j \ne i} \exp(\cos(u_i, u_j) / \tau)}

    over the 2N views u of both sides, i' being the other view of i's text (``"simclr"``), or one way,

    .. math::
        -\frac{1}{N} \sum_{i=1}^{N} \log
        \frac{\exp(\cos(x_i, y_i) / \tau)}{\sum_{j=1}^{N} \exp(\cos(x_i, y_j) / \tau)}

    Args:
        first: one view of each text, shape ``(N, D)``, two texts or more.
        second: another view of the same texts, shape ``(N, D)``.
        temperature: :math:`\tau`, ``> 0``.
        form: ``"simclr"``, ``"one_way"``, or ``"bound"``: log N minus the one-way loss, a lower bound on the mutual
            information of the views.

    Returns:
        Scalar, ``>= 0`` as a loss; at chance ``log(2N - 1)`` or one way ``log(N)``. The bound is at most ``log(N)``. A
        zero vector has cosine 0 with all others. NaN if the views hold NaN or infinity.

    Example:
        >>> infonce(torch.ones(4, 3), torch.ones(4, 3))  # at chance, log 7
        tensor(1.9459)
    """
    _check_options(temperature, form)
    check_pair(first, second, same_width=True)
    return _infonce(first, second, temperature=temperature, form=form).to(result_dtype(first))


def _infonce(first: Tensor, second: Tensor, *, temperature: float, form: InfoNCEForm) -> Tensor:
    """Return the loss of two views, each ``(*, N, D)``: shape ``(*)``."""
    x, y = unit_rows(precise(first)), unit_rows(precise(second))
    loss = _simclr(x, y, temperature) if form == "simclr" else _one_way(x, y, temperature)
    return math.log(x.shape[-2]) - loss if form == "bound" else loss


def _simclr(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    views = torch.cat([x, y], dim=-2)
    with full_precision(x.device):
        cosine = views @ views.mT
    cosine.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    half = x.shape[-2]
    partners = torch.cat([cosine.diagonal(offset, dim1=-2, dim2=-1) for offset in (half, -half)], dim=-1)
    return _cross_entropy(cosine, partners, temperature)


def _one_way(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    with full_precision(x.device):
        cosine = x @ y.mT
    return _cross_entropy(cosine, cosine.diagonal(dim1=-2, dim2=-1), temperature)


def _cross_entropy(cosine: Tensor, positive: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of the rows of cosines ``(*, N, M)`` with the positives' cosines ``(*, N)``."""
    return ((cosine / temperature).logsumexp(dim=-1) - positive / temperature).mean(dim=-1)


def _check_options(temperature: float, form: str) -> None:
    if not temperature > 0:
        raise OptionError(f"`temperature` must be greater than 0, but got {temperature}.")
    check_choice("form", form, get_args(InfoNCEForm))


class InfoNCE(ViewMetric, function=infonce, check=_check_options, number=_infonce):
    """:func:`infonce` of views 0 and 1 of each text, per layer.

    Options are those of the function and of :class:`SampleMetric`. The loss grows with the number of texts.
    """
