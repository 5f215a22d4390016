"""Effective rank of the tokens of one text."""

from __future__ import annotations

from torch import Tensor

from midlayer_encoders.metrics._gram import result_dtype, token_gram
from midlayer_encoders.metrics._token_metric import TokenMetric, all_real
from midlayer_encoders.metrics.effective_rank import rank_of_gram
from midlayer_encoders.spectra import Method


def prompt_effective_rank(
    states: Tensor,
    mask: Tensor | None = None,
    *,
    center: bool = False,
    unit: bool = False,
    method: Method = "exact",
) -> Tensor:
    r"""Return the effective rank of each text's tokens.

    .. math::
        \operatorname{EffRank}(Z), \qquad Z = \text{the token states of one text}

    as in :func:`effective_rank`.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all.
        center: subtract the mean of the text's tokens.
        unit: scale tokens to unit length, after centering.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(*)``, between ``1`` and ``min(T, D)``; ``0`` if all tokens are zero, NaN if they hold NaN or infinity.

    Example:
        >>> import torch
        >>> prompt_effective_rank(torch.eye(3)[None].repeat(2, 1, 1))
        tensor([3., 3.])
    """
    mask = all_real(states) if mask is None else mask
    return _rank(states, mask, center, unit, method).to(result_dtype(states))


def _rank(states: Tensor, mask: Tensor, center: bool, unit: bool, method: Method) -> Tensor:
    # float64 on every device, as in `effective_rank`.
    return rank_of_gram(*token_gram(states.double(), mask, center=center, unit=unit), method)


class PromptEffectiveRank(TokenMetric, function=prompt_effective_rank):
    """Mean over texts of :func:`prompt_effective_rank`, per layer.

    Texts of fewer than two tokens are excluded and counted in ``skipped``. Options are those of the function.
    """

    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return _rank(states, mask, **self.options), mask.sum(dim=-1) >= 2
