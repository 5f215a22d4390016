"""Effective rank of a set of rows: how many singular directions carry it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.metrics._base.gram import token_gram
from midlayer_encoders.metrics._base.moment_metric import Moments
from midlayer_encoders.metrics._base.precision import result_dtype
from midlayer_encoders.metrics._base.row_metric import RowMetric
from midlayer_encoders.metrics._base.token_metric import all_real
from midlayer_encoders.spectra import Method, eigenvalues

__all__ = ["EffectiveRank", "effective_rank", "rank_of_tokens"]


def effective_rank(
    states: Tensor,
    *,
    mask: Tensor | None = None,
    center: bool = False,
    unit: bool = False,
    method: Method = "exact",
) -> Tensor:
    r"""Return the effective rank of each set of rows (Roy & Vetterli, 2007; RankMe is the same with an epsilon).

    .. math::
        \operatorname{EffRank}(Z) = \exp\Bigl(-\sum_i q_i \log q_i\Bigr), \qquad
        q_i = \sigma_i(Z) / \textstyle\sum_j \sigma_j(Z)

    over singular values, not their squares, so :math:`\exp S_1(Z) \le \operatorname{EffRank}(Z)`; the paper's Theorem 1
    has it the other way round.

    Args:
        states: rows, shape ``(*, N, D)``.
        mask: which rows are real, shape ``(*, N)``, bool; ``None`` for all.
        center: subtract the mean of the rows.
        unit: scale rows to unit length, after centering.
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`; the fast way loses the small ones.

    Returns:
        Shape ``(*)``, between ``1`` and ``min(N, D)``; ``0`` where all rows are zero, NaN where they hold NaN or
        infinity.

    Example:
        >>> effective_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0])))
        tensor(2.)
    """
    mask = all_real(states) if mask is None else mask
    return rank_of_tokens(states, mask, center=center, unit=unit, method=method).to(result_dtype(states))


def rank_of_tokens(states: Tensor, mask: Tensor, *, center: bool, unit: bool, method: Method) -> Tensor:
    """Return the effective rank of states ``(*, N, D)`` in float64, shape ``(*)``."""
    # In float64 anywhere: the root of an eigenvalue at float32's rounding is 3e-4 of the largest, and there are many.
    return rank_of_gram(*token_gram(states.double(), mask, center=center, unit=unit), method)


def rank_of_gram(gram: Tensor, sizes: Tensor | None, method: Method) -> Tensor:
    """Return the effective rank from Gram or moment matrices, shape ``(*)``; NaN where a matrix is not finite."""
    finite = torch.isfinite(gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1))
    values = eigenvalues(torch.where(finite[..., None, None], gram, 0.0), sizes, method=method)
    # The square root of an eigenvalue that is only rounding is not small: a rank-one matrix would seem to have more.
    rounding = values[..., :1] * values.shape[-1] * torch.finfo(values.dtype).eps
    sigma = torch.where(values > rounding, values, 0.0).sqrt()
    total = sigma.sum(dim=-1, keepdim=True)
    share = sigma / torch.where(total > 0, total, 1.0)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(finite, torch.where(total[..., 0] > 0, rank, 0.0), torch.nan)


class EffectiveRank(RowMetric):
    """:func:`effective_rank` of one vector per text, per layer; exact, see :class:`RowMetric` for what is kept.

    For the tokens of each text see :class:`PromptEffectiveRank`.

    Args:
        layers: layer numbers that ``update`` will name.
        center: subtract the mean of the rows, after ``unit``.
        unit: scale rows to unit length.
        method: how eigenvalues are found.
        torchmetrics_options: torchmetrics' own.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        center: bool = False,
        unit: bool = False,
        method: Method = "exact",
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(layers, **torchmetrics_options)
        self.center, self.unit, self.method = center, unit, method

    def _of(self, moments: Moments) -> Tensor:
        return rank_of_gram(moments.matrix, None, self.method)
