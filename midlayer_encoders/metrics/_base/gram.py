"""The smaller of the Gram matrix Z Z' and the moment matrix Z' Z, which have the same spectrum."""

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders.metrics._base.kernels import kernels_run
from midlayer_encoders.metrics._base.precision import full_precision, lengths, precise

__all__ = ["prepared", "smaller_gram", "token_gram", "tokens_first"]


def prepared(states: Tensor, mask: Tensor | None, *, center: bool, unit: bool) -> Tensor:
    """Return rows in working precision: padding at zero, then centered and scaled to unit length as asked.

    A row that equals the mean but for rounding becomes zero, so that repeated rows do not turn into scaled-up noise.

    Args:
        states: shape ``(*, N, D)``.
        mask: real rows, shape ``(*, N)``; ``None`` for all.
        center: subtract the mean of the real rows.
        unit: scale rows to length one, after that.

    Returns:
        Shape ``(*, N, D)``.
    """
    rows, mean = _centered(states, mask, center)
    if not center and not unit:
        return rows
    return rows * _scale(lengths(rows), lengths(mean), mask, unit).unsqueeze(-1)


def token_gram(states: Tensor, mask: Tensor, *, center: bool, unit: bool) -> tuple[Tensor, Tensor | None]:
    """Return :func:`smaller_gram` of each text's :func:`prepared` tokens, and how much of each matrix counts.

    Args:
        states: shape ``(*, T, D)``.
        mask: real tokens, shape ``(*, T)``; they are brought to the front.
        center: subtract the mean of the text's tokens.
        unit: scale tokens to length one, after that.

    Returns:
        Matrices of shape ``(*, n, n)`` with ``n = min(T, D)``, and the sizes of their leading corners, shape ``(*)``,
        or ``None`` where all of it counts.
    """
    if states.shape[-2] > states.shape[-1]:
        return smaller_gram(prepared(states, mask, center=center, unit=unit)), None
    if kernels_run(states):
        from midlayer_encoders.metrics._base.token_triton import prepared_gram

        return prepared_gram(states, mask, center=center, unit=unit)
    states, mask = tokens_first(states, mask)
    rows, mean = _centered(states, mask, center)
    gram = smaller_gram(rows)
    if center or unit:
        # The squared lengths are on the diagonal, and scaling T x T numbers is quicker than T x D.
        scale = _scale(gram.diagonal(dim1=-2, dim2=-1).sqrt(), lengths(mean), mask, unit)
        gram = gram.mul_(scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))
    return gram, mask.sum(dim=-1)


def _centered(states: Tensor, mask: Tensor | None, center: bool) -> tuple[Tensor, Tensor]:
    """Return rows in working precision, zero or minus the mean where padded, and what was subtracted, ``(*, 1, D)``."""
    rows = states if mask is None else torch.where(mask.unsqueeze(-1), states, 0.0)
    if not center:
        return precise(rows), precise(torch.zeros_like(rows[..., :1, :]))
    count = rows.shape[-2] if mask is None else mask.sum(dim=-1).clamp(min=1)[..., None, None]
    mean = rows.sum(dim=-2, keepdim=True, dtype=precise(rows[..., :0, :]).dtype) / count
    return rows - mean, mean


def _scale(length: Tensor, mean_length: Tensor, mask: Tensor | None, unit: bool) -> Tensor:
    """Return what each row is multiplied with: 0 for padding and for rows that are only rounding; shape ``(*, N)``."""
    real = torch.ones_like(length, dtype=torch.bool) if mask is None else mask
    longest = torch.where(real, length, 0.0).amax(dim=-1, keepdim=True)
    tiny = torch.where(mean_length == 0, 0.0, 32 * torch.finfo(length.dtype).eps * (mean_length + longest))
    kept = real & ~(length <= tiny)  # NaN is kept
    return torch.where(kept, 1.0 / length if unit else 1.0, 0.0)


def smaller_gram(rows: Tensor) -> Tensor:
    """Return ``rows rows'`` or ``rows' rows`` of ``(*, N, D)``, whichever is smaller: ``(*, min(N, D), min(N, D))``."""
    with full_precision(rows.device):
        return rows @ rows.mT if rows.shape[-2] <= rows.shape[-1] else rows.mT @ rows


def tokens_first(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``(*, T, D)`` with the real tokens of each text in front, in their order, and the mask of that."""
    # On a CPU checking whether they are there already costs nothing; on a GPU it would wait for the device.
    if mask.device.type == "cpu" and not (mask[..., 1:] & ~mask[..., :-1]).any():
        return states, mask
    order = torch.argsort(~mask, dim=-1, stable=True)
    return states.take_along_dim(order.unsqueeze(-1), dim=-2), mask.take_along_dim(order, dim=-1)
