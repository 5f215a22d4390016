"""Curvature: the mean angle between successive steps of the path of token states."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import kernels_can_read, lengths, result_dtype, single_or_better, tokens_first
from midlayer_encoders.metrics._token_metric import WaitingTokenMetric, all_real


def curvature(states: Tensor, mask: Tensor | None = None, *, step: int = 1) -> Tensor:
    r"""Return the mean angle between successive differences of each text's tokens, in radians.

    .. math::
        \frac{1}{T-2} \sum_{k=1}^{T-2} \angle(v_{k+1}, v_k), \qquad v_k = z_{k+1} - z_k

    and for a step s, :math:`v_k = z_{k+s} - z_k` and the angle between :math:`v_{k+s}` and :math:`v_k`, over
    :math:`k = 1 \ldots T - 2s`. Pairs in which a difference is zero are skipped.

    Args:
        states: token states, shape ``(*, T, D)``.
        mask: which tokens are real, shape ``(*, T)``, bool; ``None`` for all. Other tokens are left out of the path.
        step: number of tokens that a difference spans, 1 or more.

    Returns:
        Shape ``(*)``, between ``0`` (a line) and ``pi`` (back and forth). NaN if a text has fewer than
        ``2 * step + 1`` tokens or no nonzero difference, or its states hold NaN or infinity.

    Example:
        >>> curvature(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [2.0, 1.0]]))
        tensor(1.5708)
    """
    _check_step(step)
    total, count = _angles(*_turns(states, all_real(states) if mask is None else mask, step))
    return (total / count).to(result_dtype(states))


def _angles(apart: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of each text's angles and their number, both ``(*)``."""
    # Kahan's formula has full precision near 0 and pi, where the arc cosine loses half the digits.
    angles = 2 * torch.atan2(apart.double().sqrt(), along.double().sqrt())
    counts = apart != -1
    return torch.where(counts, angles, 0.0).sum(dim=-1), counts.sum(dim=-1)


def _turns(states: Tensor, mask: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return, for unit differences u and w that follow each other, the squared lengths of w - u and w + u, or -1."""
    if kernels_can_read(states):
        from midlayer_encoders.metrics._token_triton import turns

        return turns(states, mask, step)
    path, mask = tokens_first(states, mask)
    path = single_or_better(path)
    moves = path[..., step:, :] - path[..., :-step, :]
    length = lengths(moves)
    moves = moves / length.unsqueeze(-1)
    before, after = moves[..., :-step, :], moves[..., step:, :]
    exists = torch.arange(before.shape[-2], device=mask.device) + 2 * step < mask.sum(dim=-1, keepdim=True)
    exists = exists & (length[..., :-step] != 0) & (length[..., step:] != 0)
    apart, along = lengths(after - before).square(), lengths(after + before).square()
    return torch.where(exists, apart, -1.0), torch.where(exists, along, -1.0)


def _check_step(step: int) -> None:
    if step < 1:
        raise OptionError(f"`step` must be 1 or more, but got {step}.")


class Curvature(WaitingTokenMetric, function=curvature, check=_check_step):
    """Mean over texts of :func:`curvature`, per layer.

    Texts without an angle (fewer than ``2 * step + 1`` tokens, or all tokens equal) are excluded and counted in
    ``skipped``. Options are those of the function.
    """

    _max_waiting_bytes: ClassVar[int] = 2**23  # more layers at once would save no time, and angles are in float64

    def _temporaries(self, states: Tensor) -> int:
        return states.shape[1] * (1 if kernels_can_read(states) else states.shape[2])

    def _ingredients(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return _turns(states, mask, self.options["step"])

    def _settled(self, ingredients: tuple[Tensor, ...], _: int) -> tuple[Tensor, Tensor]:
        total, count = _angles(*ingredients)
        return total / count, count > 0
