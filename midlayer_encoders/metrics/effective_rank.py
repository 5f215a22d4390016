"""Effective rank: the exponential of the entropy of a set of rows' singular values."""

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import prepared, result_dtype, smaller_gram
from midlayer_encoders.metrics._row_metric import Moments, RowMetric
from midlayer_encoders.metrics._token_metric import all_real
from midlayer_encoders.spectra import Method, eigenvalues


def effective_rank(
    states: Tensor,
    *,
    mask: Tensor | None = None,
    center: bool = False,
    unit: bool = False,
    epsilon: float = 0.0,
    method: Method = "exact",
) -> Tensor:
    r"""Return the effective rank of each set of rows (Roy & Vetterli, 2007), or RankMe (Garrido et al., 2023).

    .. math::
        \operatorname{EffRank}(Z) = \exp\Bigl(-\sum_i q_i \log q_i\Bigr), \qquad
        q_i = \sigma_i(Z) / \textstyle\sum_j \sigma_j(Z) + \epsilon

    over the :math:`\min(N, D)` singular values, not their squares, so
    :math:`\exp S_1(Z) \le \operatorname{EffRank}(Z)`; the paper's Theorem 1 states the opposite. With
    ``epsilon=1e-7`` it is RankMe, the same as ``make_metrics("rankme", …)``.

    Args:
        states: rows, shape ``(*, N, D)``.
        mask: which rows are real, shape ``(*, N)``, bool; ``None`` for all.
        center: subtract the mean of the rows.
        unit: scale rows to unit length, before centering.
        epsilon: added to each share, ``>= 0``.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`; ``"fast"`` loses the small ones.

    Returns:
        Shape ``(*)``, between ``1`` and ``min(N, D)``, up to ``epsilon``; ``0`` if all rows are zero, NaN if they hold
        NaN or infinity.

    Example:
        >>> effective_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0])))
        tensor(2.)
    """
    _check_epsilon(epsilon)
    mask = all_real(states) if mask is None else mask
    # float64 on every device: the square root of float32's rounding is 3e-4 of the largest singular value.
    rows = prepared(states.double(), mask, center=False, unit=unit)
    gram = smaller_gram(prepared(rows, mask, center=True, unit=False) if center else rows)
    return rank_of_gram(gram, None, method, epsilon, mask.sum(dim=-1)).to(result_dtype(states))


def rank_of_gram(
    gram: Tensor, sizes: Tensor | None, method: Method, epsilon: float = 0.0, count: Tensor | None = None
) -> Tensor:
    """Return the effective rank of Gram or moment matrices, shape ``(*)``; NaN if a matrix is not finite.

    Args:
        gram: shape ``(*, n, n)``.
        sizes: sizes of the leading corners, shape ``(*)``; ``None`` for whole matrices.
        method: eigenvalue method.
        epsilon: added to the share of every singular value.
        count: number of rows of each set, shape ``(*)``, an upper limit of the number of singular values.
    """
    finite = torch.isfinite(gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1))
    values = eigenvalues(torch.where(finite[..., None, None], gram, 0.0), sizes, method=method, check=False)
    # The square root of rounding is not small: it would raise the rank of a rank-one matrix.
    rounding = values[..., :1] * values.shape[-1] * torch.finfo(values.dtype).eps
    sigma = torch.where(values > rounding, values, 0.0).sqrt()
    total = sigma.sum(dim=-1, keepdim=True)
    share = sigma / torch.where(total > 0, total, 1.0)
    if epsilon and count is not None:
        exists = torch.arange(share.shape[-1], device=share.device) < count.unsqueeze(-1)
        share = torch.where(exists, share + epsilon, share)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(finite, torch.where(total[..., 0] > 0, rank, 0.0), torch.nan)


def _rank(moments: Moments, *, epsilon: float, method: Method) -> Tensor:
    return rank_of_gram(moments.matrix, None, method, epsilon, moments.count)


def _check_epsilon(epsilon: float) -> None:
    if not epsilon >= 0:
        raise OptionError(f"`epsilon` must be 0 or more (1e-7 for RankMe), but got {epsilon}.")


class EffectiveRank(RowMetric, function=effective_rank, check=_check_epsilon, number=_rank):
    """:func:`effective_rank` of one vector per text, per layer; exact, see :class:`RowMetric`.

    For the tokens of each text see :class:`PromptEffectiveRank`. Options are those of the function.
    """
