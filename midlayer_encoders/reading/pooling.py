"""Token states to one vector, for many layers inside one forward pass; the same numbers as sentence-transformers'."""

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.errors import check_choice

__all__ = ["pool"]


def pool(states: Tensor, mask: Tensor, pooling: Pooling = "mean") -> Tensor:
    r"""Return one vector for each text, over its real tokens, whichever side is padded.

    .. math::
        \text{mean: } \frac{\sum_t m_t z_t}{\sum_t m_t}, \qquad
        \text{weightedmean: } \frac{\sum_t m_t\, i_t\, z_t}{\sum_t m_t\, i_t},
        \quad i_t = 1, 2, \dots \text{ over the real tokens}

    Args:
        states: shape ``(B, T, D)``.
        mask: true at real tokens, shape ``(B, T)``.
        pooling: ``"mean"``, ``"last"``, ``"cls"`` (the first token), ``"max"`` or ``"weightedmean"``.

    Returns:
        Shape ``(B, D)``, float32 or better. A text without tokens gives zeros.

    Example:
        >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> [pool(states, mask, pooling).item() for pooling in ("mean", "last", "cls", "max")]
        [2.0, 3.0, 1.0, 3.0]
    """
    check_choice("pooling", pooling, POOLINGS)
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    if pooling in ("mean", "weightedmean"):
        weights = mask.to(states.dtype) if pooling == "mean" else mask * mask.cumsum(dim=1).to(states.dtype)
        total = torch.einsum("btd,bt->bd", states, weights)
        return total / weights.sum(dim=1, keepdim=True).clamp(min=1)
    real = mask.any(dim=1, keepdim=True)
    if pooling == "max":
        return states.masked_fill(~mask[..., None], -torch.inf).amax(dim=1).masked_fill(~real, 0.0)
    place = mask.int().argmax(dim=1) if pooling == "cls" else mask.shape[1] - 1 - mask.int().flip(1).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), place].masked_fill(~real, 0.0)
