"""Attention in which no head needs the first token to attend to nothing, or cannot attend to it at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

__all__ = ["SINKS", "attend_past_the_first", "attend_with_a_place_for_nothing", "give_sink"]

SINKS = ("one", "key", "hidden")
"""What the first token may be replaced by as the place that a head attends to when it wants nothing.

``one``: a one in the softmax's denominator. ``key``: a learned key for each head, with no value. ``hidden``: nothing, and no
later token may attend to the first one.
"""


def give_sink(backbone: Any, sink: str) -> None:
    """Give a model of Llama's blocks one of ``SINKS``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"sink_{sink}"
    AttentionInterface.register(name, attend_past_the_first if sink == "hidden" else attend_with_a_place_for_nothing)
    AttentionMaskInterface.register(name, sdpa_mask)
    backbone.set_attn_implementation(name)
    if sink == "key":
        for block in backbone.layers:
            # A vector, so that weight decay leaves it alone; of zeros it is the one in the denominator.
            block.self_attn.sink_key = nn.Parameter(
                torch.zeros(backbone.config.num_attention_heads * block.self_attn.head_dim)
            )


def attend_with_a_place_for_nothing(
    module: Any,
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
        \mathrm{out}_t = \sum_{s \le t} \frac{e^{q_t k_s}}{e^{q_t k'} + \sum_{r \le t} e^{q_t k_r}} v_s

    with the head's own key :math:`k'`, ``module.sink_key``, or zeros, which give a one. It stands before all others, with a
    value of zeros. A query before all others, whose output is dropped, keeps the causal mask where the fast kernels expect it.
    """
    B, H, _, D = query.shape
    own = getattr(module, "sink_key", None)
    nothing = key.new_zeros(B, H, 1, D) if own is None else own.to(key.dtype).view(1, H, 1, D).expand(B, -1, -1, -1)
    if not torch.is_grad_enabled():
        made = _weights(query, torch.cat([nothing, key], dim=2), attention_mask, scaling)[..., 1:]
        return _gathered(made, value), made
    if attention_mask is not None:
        attention_mask = pad(pad(attention_mask, (1, 0), value=True), (0, 0, 1, 0), value=True)
    gathered = scaled_dot_product_attention(
        pad(query, (0, 0, 1, 0)), torch.cat([nothing, key], dim=2), pad(value, (0, 0, 1, 0)),
        attn_mask=attention_mask, dropout_p=dropout, scale=scaling, is_causal=attention_mask is None,
    )  # fmt: skip
    return gathered[:, :, 1:].transpose(1, 2).contiguous(), None


def attend_past_the_first(
    module: Any,  # noqa: ARG001  # transformers passes it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what each query gathers, the first token from itself, the others from all but the first.

    Shapes as in :func:`attend_with_a_place_for_nothing`.
    """
    later = slice(1, None)
    inner = None if attention_mask is None else attention_mask[..., later, later]
    if torch.is_grad_enabled():
        gathered = scaled_dot_product_attention(
            query[:, :, later], key[:, :, later], value[:, :, later],
            attn_mask=inner, dropout_p=dropout, scale=scaling, is_causal=inner is None,
        )  # fmt: skip
        return torch.cat([value[:, :, :1], gathered], dim=2).transpose(1, 2).contiguous(), None
    made = _weights(query[:, :, later], key[:, :, later], inner, scaling).nan_to_num()  # padding may see nothing at all
    made = pad(made, (1, 0, 1, 0))
    made[..., 0, 0] = 1
    return _gathered(made, value), made


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Return the attention of T queries to S keys, ``(B, H, T, S)``, in float32; the first S - T are seen by all."""
    T, S = query.shape[2], key.shape[2]
    seen = torch.ones(T, T, dtype=torch.bool, device=query.device).tril() if mask is None else mask
    with torch.autocast(query.device.type, enabled=False):  # the fast kernels, too, keep the products in float32
        scores = (query.float() @ key.float().mT) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return torch.softmax(scores.masked_fill(~pad(seen, (S - T, 0), value=True), -torch.inf), dim=-1)


def _gathered(weights: Tensor, value: Tensor) -> Tensor:
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
