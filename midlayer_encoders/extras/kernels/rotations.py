"""A Triton kernel that rotates queries or keys by their positions in one pass over them."""
# Parameters of Triton kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from midlayer_encoders.extras.kernels.spectra import constexpr, jit, tl, triton

_ELEMENTS = 4096  # of the heads that one program rotates


@partial(jit, general=["T"])  # any number of tokens
def _rotate(
    states, cosines, sines, out, T, H, HALF,
    stride_b, stride_h, stride_t, out_b, out_h, out_t, table_b, table_t,
    HEADS: constexpr, COLS: constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64) // T
    t = tl.program_id(0).to(tl.int64) % T
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, COLS)
    inside = (heads < H)[:, None] & (cols < HALF)[None, :]
    at = b * stride_b + t * stride_t + heads[:, None] * stride_h + cols[None, :]
    at_out = b * out_b + t * out_t + heads[:, None] * out_h + cols[None, :]
    first = tl.load(states + at, mask=inside, other=0.0)
    second = tl.load(states + at + HALF, mask=inside, other=0.0)
    table = b * table_b + t * table_t + cols
    dtype = first.dtype
    # Each product and each sum is rounded as the separate operations of transformers round them.
    cosine = tl.load(cosines + table, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + table, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    straight = (first.to(tl.float32) * cosine).to(dtype).to(tl.float32)
    turned = (-second.to(tl.float32) * sine).to(dtype).to(tl.float32)
    tl.store(out + at_out, (straight + turned).to(dtype), mask=inside)
    cosine = tl.load(cosines + table + HALF, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + table + HALF, mask=cols < HALF, other=0.0).to(tl.float32)[None, :]
    straight = (second.to(tl.float32) * cosine).to(dtype).to(tl.float32)
    turned = (first.to(tl.float32) * sine).to(dtype).to(tl.float32)
    tl.store(out + at_out + HALF, (straight + turned).to(dtype), mask=inside)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return ``states * cosines + rotate_half(states) * sines``, bitwise equal to these operations one by one.

    Args:
        states: queries or keys, shape ``(B, H, T, D)``, the last axis contiguous.
        cosines: shape ``(B, T, D)`` or ``(1, T, D)``, contiguous, with the dtype of the states.
        sines: as the cosines.
    """
    B, H, T, D = states.shape
    out = torch.empty_like(states)
    table_b = cosines.stride(0) if len(cosines) > 1 else 0
    cols = triton.next_power_of_2(D // 2)
    heads = max(1, min(triton.next_power_of_2(H), _ELEMENTS // cols))
    with torch.cuda.device_of(states):  # Triton launches on the current device
        _rotate[(B * T, triton.cdiv(H, heads))](
            states, cosines, sines, out, T, H, D // 2, *states.stride()[:3], *out.stride()[:3],
            table_b, cosines.stride(1), HEADS=heads, COLS=cols, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
