"""A Triton kernel that normalizes and sums token states in one pass over them."""
# Parameters of Triton kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midlayer_encoders.spectra._triton import constexpr, jit, tl, triton

_SPAN = 128  # tokens per program


@partial(jit, general=["T"])  # any number of tokens
def _sum_tokens(
    states, weights, sums, D, T, stride_b, stride_t, EPS,
    SPAN: constexpr, ROWS: constexpr, COLS: constexpr, SCALE: constexpr, CENTER: constexpr,
):  # fmt: skip
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
        token = states + b * stride_b + at[:, None].to(tl.int64) * stride_t + cols[None, :]
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
    """Compute :func:`~midlayer_encoders.reading.pooling.normed_sums` with one read of the states, deterministic."""
    B, T, D = states.shape
    parts, cols = triton.cdiv(T, _SPAN), triton.next_power_of_2(D)
    sums = torch.empty(B, parts, D, device=states.device)
    rows, warps = max(1, min(16, 8192 // cols)), 8 if cols > 256 else 4
    with torch.cuda.device_of(states):  # Triton launches on the current device
        _sum_tokens[(B, parts)](
            states, weights.float().contiguous(), sums, D, T, states.stride(0), states.stride(1), eps,
            SPAN=_SPAN, ROWS=rows, COLS=cols, SCALE=scale, CENTER=center, num_warps=warps,
        )  # fmt: skip
    return sums[:, 0] if parts == 1 else sums.sum(dim=1)
