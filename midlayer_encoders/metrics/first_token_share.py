"""First token share: the first token's share of a text's squared norm."""

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders.metrics._gram import lengths, result_dtype, single_or_better
from midlayer_encoders.metrics._token_metric import TokenMetric, all_real


def first_token_share(states: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Return the first token's share of the squared norm of each text's tokens.

    .. math::
        \frac{\lVert z_1 \rVert^2}{\sum_t \lVert z_t \rVert^2}

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. The first real token is the first token.

    Returns:
        Shape ``(*)``, between ``0`` and ``1``; ``1 / T`` if all tokens are equally long. NaN if there is no token, all
        are zero, or the states hold NaN or infinity.

    Example:
        >>> first_token_share(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor(0.9000)
    """
    first, total = _energies(states, all_real(states) if mask is None else mask)
    return _share(first, total).to(result_dtype(states))


def _energies(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the squared norm of each text's first real token and of all its tokens, both ``(*)``."""
    # Squares in float64, so that a massive token does not overflow.
    energy = torch.where(mask, lengths(single_or_better(states)).double(), 0.0).square()
    first = mask.int().argmax(dim=-1, keepdim=True)
    return energy.gather(-1, first).squeeze(-1), energy.sum(dim=-1)


def _share(first: Tensor, total: Tensor) -> Tensor:
    return torch.where(total.isinf(), torch.nan, first / total)


class FirstTokenShare(TokenMetric):
    """Mean over texts of :func:`first_token_share`, per layer.

    Texts without a token, or with only zeros, are excluded and counted in ``skipped``.
    """

    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        first, total = _energies(states, mask)
        return _share(first, total), total != 0
