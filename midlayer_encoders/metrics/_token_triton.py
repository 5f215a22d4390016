"""Token states read once: centred Gram matrices and turning angles of many texts on a GPU, as Triton kernels.

The plain way makes a float32 copy of the states, and another for each step, and reads each of them several times: on an
H200 that takes longer than the eigenvalues. Here the states are read as they are, in the order of the real tokens, and
only numbers per token or per pair of tokens are written.
"""
# Triton's kernels are no Python: their parameters have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # The module can still be imported, to be read or collected by pytest; nothing in it can run.
    triton = tl = None

__all__ = ["centred_gram", "turns"]


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _mean(states, order, sizes, means, D, batch_stride, token_stride, T, ROWS: tl.constexpr, COLS: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + b)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), dtype=tl.float32)
    for start in range(0, size, ROWS):
        at = start + tl.arange(0, ROWS)
        token = tl.load(order + b * T + at, mask=at < size, other=0)
        inside = (at < size)[:, None] & (cols < D)[None, :]
        block = tl.load(
            states + b * batch_stride + token[:, None] * token_stride + cols[None, :], mask=inside, other=0.0
        )
        total += tl.sum(block.to(tl.float32), 0)
    tl.store(means + b * D + cols, total / tl.maximum(size, 1), mask=cols < D)


@_jit
def _gram(
    states,
    order,
    sizes,
    means,
    gram,
    D,
    batch_stride,
    token_stride,
    T,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    CENTER: tl.constexpr,
):
    i, j = tl.program_id(0), tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if j > i:
        return
    size = tl.load(sizes + b)
    at_i = i * ROWS + tl.arange(0, ROWS)
    at_j = j * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    if i * ROWS < size:
        states += b * batch_stride
        token_i = tl.load(order + b * T + at_i, mask=at_i < size, other=0)
        token_j = tl.load(order + b * T + at_j, mask=at_j < size, other=0)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            in_i = (at_i < size)[:, None] & (cols < D)[None, :]
            in_j = (at_j < size)[:, None] & (cols < D)[None, :]
            x = tl.load(states + token_i[:, None] * token_stride + cols[None, :], mask=in_i, other=0.0).to(tl.float32)
            y = tl.load(states + token_j[:, None] * token_stride + cols[None, :], mask=in_j, other=0.0).to(tl.float32)
            if CENTER:
                mean = tl.load(means + b * D + cols, mask=cols < D, other=0.0)[None, :]
                x = tl.where(in_i, x - mean, 0.0)
                y = tl.where(in_j, y - mean, 0.0)
            # Three products on tensor cores, as exact as one in float32.
            acc = tl.dot(x, tl.trans(y), acc, input_precision="tf32x3")
    gram += b * T * T
    inside = (at_i < T)[:, None] & (at_j < T)[None, :]
    tl.store(gram + at_i[:, None] * T + at_j[None, :], acc, mask=inside)
    tl.store(gram + at_j[None, :] * T + at_i[:, None], acc, mask=inside)


@_jit
def _turn(
    states, order, sizes, apart, along, D, batch_stride, token_stride, T, STEP, ROWS: tl.constexpr, COLS: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + b)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = at + 2 * STEP < size
    states += b * batch_stride
    first = tl.load(order + b * T + at, mask=real, other=0)[:, None] * token_stride
    middle = tl.load(order + b * T + at + STEP, mask=real, other=0)[:, None] * token_stride
    last = tl.load(order + b * T + at + 2 * STEP, mask=real, other=0)[:, None] * token_stride
    before = tl.zeros((ROWS,), dtype=tl.float32)
    after = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, D, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        inside = real[:, None] & (cols < D)
        here = tl.load(states + middle + cols, mask=inside, other=0.0).to(tl.float32)
        v = here - tl.load(states + first + cols, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(states + last + cols, mask=inside, other=0.0).to(tl.float32) - here
        before += tl.sum(v * v, 1)
        after += tl.sum(w * w, 1)
    turns_at_all = real & (before != 0) & (after != 0)
    before = tl.where(turns_at_all, 1.0 / tl.sqrt(before), 0.0)[:, None]
    after = tl.where(turns_at_all, 1.0 / tl.sqrt(after), 0.0)[:, None]
    minus = tl.zeros((ROWS,), dtype=tl.float32)
    plus = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, D, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        inside = real[:, None] & (cols < D)
        here = tl.load(states + middle + cols, mask=inside, other=0.0).to(tl.float32)
        v = (here - tl.load(states + first + cols, mask=inside, other=0.0).to(tl.float32)) * before
        w = (tl.load(states + last + cols, mask=inside, other=0.0).to(tl.float32) - here) * after
        minus += tl.sum((w - v) * (w - v), 1)
        plus += tl.sum((w + v) * (w + v), 1)
    tl.store(apart + b * T + at, tl.where(turns_at_all, minus, -1.0), mask=at < T)
    tl.store(along + b * T + at, tl.where(turns_at_all, plus, -1.0), mask=at < T)


def centred_gram(states: Tensor, mask: Tensor, *, center: bool) -> tuple[Tensor, Tensor]:
    """Return the Gram matrices of texts' tokens, minus their mean if asked, real tokens first, and the means.

    Args:
        states: shape ``(B, T, D)``, the last axis contiguous.
        mask: real tokens, shape ``(B, T)``.
        center: subtract the mean of the text's tokens.

    Returns:
        Shapes ``(B, T, T)``, zero beyond each text's tokens, and ``(B, 1, D)``, both float32. Off by at most about 1e-6
        of the product of two tokens' lengths (5e-7 on an H200).
    """
    B, T, D = states.shape
    order, sizes = _order(mask)
    means = torch.zeros(B, 1, D, device=states.device)
    gram = torch.empty(B, T, T, device=states.device)
    strides = states.stride(0), states.stride(1)
    if center:
        _mean[(B, triton.cdiv(D, 128))](states, order, sizes, means, D, *strides, T, ROWS=32, COLS=128, num_warps=4)
    tiles = triton.cdiv(T, 64)
    _gram[(tiles, tiles, B)](
        states, order, sizes, means, gram, D, *strides, T, ROWS=64, COLS=32, CENTER=center, num_warps=4
    )
    return gram, means


def turns(states: Tensor, mask: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return, for unit differences u and w that follow each other, the squared lengths of w - u and w + u.

    Args:
        states: shape ``(B, T, D)``, the last axis contiguous.
        mask: real tokens, shape ``(B, T)``.
        step: how many tokens a difference spans.

    Returns:
        Both shape ``(B, T)``, float32; -1 where there is no pair of differences, or one is zero.
    """
    B, T, D = states.shape
    order, sizes = _order(mask)
    apart, along = torch.empty(2, B, T, device=states.device)
    _turn[(B, triton.cdiv(T, 8))](
        states,
        order,
        sizes,
        apart,
        along,
        D,
        states.stride(0),
        states.stride(1),
        T,
        step,
        ROWS=8,
        COLS=256,
        num_warps=4,
    )
    return apart, along


def _order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of the real tokens first, shape ``(B, T)``, and their number, ``(B,)``."""
    places = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    # Real tokens go to their rank and all others to a place that is cut off; a sort would take longer than the kernels.
    rank = torch.where(mask, mask.cumsum(dim=-1) - 1, mask.shape[-1])
    order = torch.zeros(len(mask), mask.shape[-1] + 1, dtype=torch.int64, device=mask.device)
    return order.scatter_(1, rank, places)[:, :-1].contiguous(), mask.sum(dim=-1)
