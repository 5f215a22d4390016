"""Half match: whether the two halves of a text find each other among the halves of all texts."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from midlayer_encoders.metrics._gram import full_precision, precise, result_dtype, unit_rows
from midlayer_encoders.metrics._layer_metric import Kind
from midlayer_encoders.metrics._sample_metric import NumberedMetric, check_pair
from midlayer_encoders.metrics._token_metric import check_tokens, chunks

LEAST_TOKENS = 4
"""Texts with fewer tokens are excluded: one token is not half a text."""


def half_match(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    r"""Return the mean reciprocal rank at which the halves of a text find each other, in both directions.

    .. math::
        \frac{1}{2N} \sum_i \frac{1}{r_{1 \to 2}(i)} + \frac{1}{r_{2 \to 1}(i)}

    where :math:`r_{1 \to 2}(i)` is the rank of text i's second half, by cosine with its first half, among all second
    halves. Equally near halves share the mean of their ranks.

    Args:
        first: mean of each text's first half, shape ``(N, D)``, two texts or more.
        second: mean of its second half, shape ``(N, D)``.
        center: subtract the mean of all first halves from the first halves, and likewise for the second ones. This
            removes common components, such as a massive first token.

    Returns:
        Scalar, above ``0`` and up to ``1``; about ``(log(N) + 0.58) / N`` for independent vectors. NaN if the rows
        hold NaN or infinity.

    Example:
        >>> half_match(torch.eye(4), 2 * torch.eye(4)), half_match(torch.ones(3, 2), torch.ones(3, 2))
        (tensor(1.), tensor(0.5000))
    """
    check_pair(first, second, same_width=True)
    return _half_match(first, second, center=center).to(result_dtype(first))


def _half_match(first: Tensor, second: Tensor, *, center: bool) -> Tensor:
    """Return the mean reciprocal rank of halves, each ``(*, N, D)``: shape ``(*)``."""
    halves = [precise(first), precise(second)]
    x, y = (unit_rows(half - half.mean(dim=-2, keepdim=True) if center else half) for half in halves)
    with full_precision(x.device):
        cosine = x @ y.mT
    value = (_reciprocal_ranks(cosine) + _reciprocal_ranks(cosine.mT)).mean(dim=-1) / 2
    return torch.where(torch.isfinite(cosine.sum(dim=(-2, -1))), value, torch.nan)


def _reciprocal_ranks(cosine: Tensor) -> Tensor:
    """Return the reciprocal rank of each row's diagonal entry, shape ``(*, N)``."""
    true_pairs = cosine.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    close = (cosine - true_pairs).abs() <= 16 * torch.finfo(
        cosine.dtype
    ).eps  # equal up to rounding, as cosines are at most 1
    nearer = (cosine > true_pairs) & ~close
    return 2 / (1 + 2 * nearer.sum(dim=-1) + close.sum(dim=-1)).double()


def half_means(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each text's first half of tokens and of the rest, shape ``(2, B, D)``, float32 or better.

    Args:
        states: shape ``(B, T, D)``.
        mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.

    Example:
        >>> half_means(torch.tensor([[[1.0], [3.0], [5.0], [9.0]]]), torch.ones(1, 4, dtype=torch.bool)).flatten()
        tensor([2., 7.])
    """
    count = mask.sum(dim=1, keepdim=True)
    early = mask & (mask.cumsum(dim=1) <= count // 2)
    halves = torch.stack([early, mask & ~early])  # (2, B, T)
    # Padding may hold NaN, and NaN times zero is NaN.
    clean = torch.where(mask.unsqueeze(-1), states, 0.0).to(result_dtype(states))
    with full_precision(states.device):
        total = torch.einsum("vbt,btd->vbd", halves.to(clean.dtype), clean)
    return total / halves.sum(dim=2).clamp(min=1).unsqueeze(-1)


class HalfMatch(NumberedMetric, function=half_match, number=_half_match):
    """:func:`half_match` of each layer, from the token states of one pass: no augmentation, no second pass.

    Texts of fewer than four tokens are excluded. Options are those of the function and of :class:`SampleMetric`. The
    value decreases with the number of texts.
    """

    kind: ClassVar[Kind] = "tokens"
    views: int = 2
    counted: ClassVar[str] = f"Different texts of {LEAST_TOKENS} tokens or more"

    def update(self, layer: int, states: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:
        """Add one layer's token states of a batch.

        Args:
            layer: one of ``layers``.
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.
            index: position of each text in the whole list, shape ``(B,)``. By default texts are numbered in order of
                arrival, which does not work with several processes.
        """
        check_tokens(states, mask)
        index = self._numbered(layer, len(states), index)
        halves = torch.cat([half_means(*chunk) for chunk in chunks(states.detach(), mask)], dim=1)
        long_enough = mask.sum(dim=1) >= LEAST_TOKENS
        index = index.to(states.device)[long_enough]
        for view, rows in enumerate(halves):
            self._store(layer, rows[long_enough], index, view)
