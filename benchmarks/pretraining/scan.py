"""A Mamba2 mixer for windows of a few hundred tokens, made of matrix products; the same function as transformers' own.

Without CUDA kernels transformers 5.17 multiplies and adds every pair of a chunk's tokens by broadcasting: on an H200 one of its
kernels alone took the compiler more than a minute. Over a window of T tokens the state-space layer is a masked attention,
y = (M * C B') x with M[t, s] = exp(sum of a over s < r <= t) (Dao & Gu 2024, equation 16), which costs what attention costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus


def use_matrix_products(backbone: Any) -> Any:
    """Return a Mamba2 whose mixers run as matrix products, for windows without a cache."""
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    # A class rather than a function on each mixer: the compiler would take twelve functions for twelve programs.
    products = type("MatrixMixer", (Mamba2Mixer,), {"forward": mixer_forward})
    for block in backbone.layers:
        block.mixer.__class__ = products
    return backbone


def mixer_forward(
    mixer: Any,
    hidden_states: Tensor,
    cache_params: Any = None,  # noqa: ARG001  # transformers passes None
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return what ``mixer`` makes of states ``(B, T, D)``."""
    states = (
        hidden_states if attention_mask is None else hidden_states * attention_mask[..., None].to(hidden_states.dtype)
    )
    gate, mixed, steps = mixer.in_proj(states).split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    mixed = silu(_convolved(mixed, mixer.conv1d.weight[:, 0], mixer.conv1d.bias))
    if attention_mask is not None:
        mixed = mixed * attention_mask[..., None].to(mixed.dtype)
    size = mixer.ssm_state_size
    x, B, C = mixed.split([mixer.intermediate_size, size, size], dim=-1)
    x = x.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    steps = softplus(steps.float() + mixer.dt_bias)
    scanned = _scanned(x, steps, -torch.exp(mixer.A_log.float()) * steps, B, C) + mixer.D[:, None] * x.float()
    return mixer.out_proj(mixer.norm(scanned.flatten(2), gate).to(hidden_states.dtype))  # type: ignore[no-any-return]


def _convolved(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Return the causal convolution of each channel, ``(B, T, C)``: four shifted products, which compile into one kernel."""
    width = weights.shape[1]
    shifted = pad(x, (0, 0, width - 1, 0))
    taps = [shifted[:, k : k + x.shape[1]] * weights[:, k].to(x.dtype) for k in range(width)]
    return torch.stack(taps).sum(dim=0) + bias.to(x.dtype)


def _scanned(x: Tensor, steps: Tensor, decays: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Return the outputs ``(B, T, H, P)`` in float32 of inputs ``(B, T, H, P)``, steps and log-decays ``(B, T, H)``."""
    T = x.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
    # A product rather than `cumsum`, whose gradient compiles slowly; in float64, which no autocast or TF32 rounds.
    sums = (causal.double() @ decays.double()).float().transpose(1, 2)  # (B, H, T)
    between = (sums[..., None] - sums[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    weights = between * (C @ B.mT)[:, None] * steps.transpose(1, 2)[:, :, None]  # (B, H, T, T)
    return (weights.to(x.dtype) @ x.transpose(1, 2)).transpose(1, 2).float()
