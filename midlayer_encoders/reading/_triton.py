"""A Triton kernel that normalizes and sums token states in one pass over them."""
# The parameters of Triton kernels have no types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # pytest still imports this module
    triton = tl = None


_MAX_WIDTH = 8192  # dimensions that fit into the registers of one program
_SPAN = 128  # tokens per program


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _sum_tokens(
    states,
    weights,
    sums,
    D,
    T,
    batch_stride,
    token_stride,
    EPS,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SCALE: tl.constexpr,
    CENTER: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    end = tl.minimum((part + 1) * SPAN, T)
    cols = tl.arange(0, COLS)
    total = tl.zeros((COLS,), dtype=tl.float32)
    for start in range(part * SPAN, end, ROWS):
        at = start + tl.arange(0, ROWS)
        weight = tl.load(weights + b * T + at, mask=at < end, other=0.0)
        real = weight != 0  # padding is never loaded, so NaN there has no effect
        inside = real[:, None] & (cols < D)[None, :]
        token = states + b * batch_stride + at[:, None].to(tl.int64) * token_stride + cols[None, :]
        x = tl.load(token, mask=inside, other=0.0).to(tl.float32)
        if CENTER:
            mean = tl.sum(x, 1) / D
            x = tl.where(inside, x - mean[:, None], 0.0)
        if SCALE:
            square = tl.where(real, tl.sum(x * x, 1) / D, 1.0)
            weight = weight / tl.sqrt(square + EPS)
        total += tl.sum(x * weight[:, None], 0)
    tl.store(sums + (b * tl.num_programs(1) + part) * D + cols, total, mask=cols < D)


def normed_sums(states: Tensor, weights: Tensor, *, scale: bool, center: bool, eps: float) -> Tensor:
    """Return the weighted sum of each text's tokens, optionally scaled to a root mean square of one.

    Args:
        states: shape ``(B, T, D)``, the last axis contiguous.
        weights: token weights, zero at padding, shape ``(B, T)``.
        scale: divide each token by its root mean square.
        center: first subtract the token's mean.
        eps: added to the mean square.

    Returns:
        Shape ``(B, D)``, float32, deterministic.
    """
    B, T, D = states.shape
    parts, cols = triton.cdiv(T, _SPAN), triton.next_power_of_2(D)
    sums = torch.empty(B, parts, D, device=states.device)
    with torch.cuda.device_of(states):  # Triton launches on the current device
        _sum_tokens[(B, parts)](
            states, weights.float().contiguous(), sums, D, T, states.stride(0), states.stride(1), eps, SPAN=_SPAN,
            ROWS=max(1, min(16, 8192 // cols)), COLS=cols, SCALE=scale, CENTER=center, num_warps=8 if cols > 256 else 4,
        )  # fmt: skip
    return sums[:, 0] if parts == 1 else sums.sum(dim=1)


def kernel_runs(states: Tensor) -> bool:
    """Return True if the kernel supports the states, on a GPU or in Triton's interpreter."""
    B, T, D = states.shape
    if states.stride(-1) != 1 or states.dtype == torch.float64 or D > _MAX_WIDTH or not B * T or not _has_triton():
        return False
    return states.is_cuda or (os.environ.get("TRITON_INTERPRET") == "1" and states.device.type == "cpu")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
