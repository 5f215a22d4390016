"""Ranks and average precisions of many rows of scores at once, with the usual treatment of equal scores."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value in its row from 1, equal values sharing the mean of their ranks; NaN beside a NaN.

    Example:
        >>> ranks(torch.tensor([[10.0, 30.0, 10.0, 20.0]]))
        tensor([[1.5000, 4.0000, 1.5000, 3.0000]], dtype=torch.float64)
    """
    values = values.contiguous()
    ordered = values.sort(dim=-1).values.contiguous()
    below = torch.searchsorted(ordered, values)
    up_to = torch.searchsorted(ordered, values, right=True)
    found = (below + up_to + 1).double() / 2
    return found.masked_fill(values.isnan().any(dim=-1, keepdim=True), torch.nan)


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Return the Pearson correlation of the rows of two tensors; NaN where a row is constant.

    Example:
        >>> correlation(torch.tensor([[1.0, 2.0, 2.0], [1.0, 1.0, 1.0]]), torch.tensor([2.0, 4.0, 6.0]))
        tensor([0.8660,    nan], dtype=torch.float64)
    """
    constant = (one == one[..., :1]).all(dim=-1) | (other == other[..., :1]).all(dim=-1)
    one, other = (x.double() - x.double().mean(dim=-1, keepdim=True) for x in (one, other))
    sizes: Tensor = torch.linalg.vector_norm(one, dim=-1) * torch.linalg.vector_norm(other, dim=-1)
    return torch.where(constant, torch.nan, (one * other).sum(dim=-1) / sizes)


def average_precision(scores: Tensor, right: Tensor) -> Tensor:
    r"""Return the average precision of each row.

    .. math::
        \sum_k (R_k - R_{k-1}) P_k

    over the distinct scores from the top, :math:`R` and :math:`P` being recall and precision down to each.

    Args:
        scores: shape ``(*, N)``.
        right: boolean, shape ``(N,)``; where none is, the answer is 0.

    Example:
        >>> average_precision(torch.tensor([[0.9, 0.8, 0.7, 0.6]]), torch.tensor([True, False, True, False]))
        tensor([0.8333], dtype=torch.float64)
    """
    ordered, order = scores.sort(dim=-1, descending=True)
    hits = right.to(scores.device)[order].double().cumsum(dim=-1)
    # Equal scores share one threshold, so each takes the counts at the last of its equals.
    last = torch.searchsorted(-ordered.contiguous(), -ordered.contiguous(), right=True) - 1
    precision = hits.gather(-1, last) / (last + 1)
    recalled = hits.diff(dim=-1, prepend=torch.zeros_like(hits[..., :1]))
    return (precision * recalled).sum(dim=-1) / hits[..., -1].clamp(min=1)
