"""Attention that may attend to nothing: a one in the softmax's denominator, so that no head needs a sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["SINK_FREE", "register", "sink_free_attention"]

SINK_FREE = "sink_free"


def register() -> None:
    """Make the attention known to transformers by its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(SINK_FREE, sink_free_attention)
    AttentionMaskInterface.register(SINK_FREE, sdpa_mask)


def sink_free_attention(
    module: Any,  # noqa: ARG001  # transformers passes it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    r"""Return what each query gathers, ``(B, T, H, D)``, and without gradients the weights ``(B, H, T, T)`` too.

    .. math::
        \mathrm{out}_t = \sum_{s \le t} \frac{e^{q_t k_s}}{1 + \sum_{r \le t} e^{q_t k_r}} v_s

    A key of zeros with a value of zeros before all others gives the one. A query before all others, whose output is
    dropped, keeps the causal mask where the fast kernels expect it.
    """
    if not torch.is_grad_enabled():
        return _with_weights(query, key, value, attention_mask, scaling)
    if attention_mask is not None:
        attention_mask = pad(pad(attention_mask, (1, 0), value=True), (0, 0, 1, 0), value=True)
    query, key, value = (pad(one, (0, 0, 1, 0)) for one in (query, key, value))
    gathered = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=attention_mask is None
    )
    return gathered[:, :, 1:].transpose(1, 2).contiguous(), None


def _with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    T = query.shape[2]
    seen = torch.ones(T, T, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(pad(scores, (1, 0)), dim=-1)[..., 1:]  # the padded column has the score zero
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights
