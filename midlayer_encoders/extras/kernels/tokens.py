"""Token states read once: centered Gram matrices and turning angles of many texts on a GPU, as Triton kernels.

Without kernels, each step makes a float32 copy of the states and reads it several times, which takes longer than the
eigenvalues on an H200. These kernels read the states in place, in the order of the real tokens, and write only numbers
per token or per pair of tokens.
"""
# Parameters of Triton kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

import torch
from torch import Tensor

from midlayer_encoders.extras.kernels.spectra import constexpr, jit, tl, triton

# The fastest launch of `_gram` on an H200, by the tokens of a tile.
_GRAM_OPTIONS = {64: {"COLS": 32, "num_warps": 4}, 128: {"COLS": 32, "num_warps": 8}}


@jit
def _compact(mask, order, sizes, stride_b, stride_t, T, BLOCK: constexpr):
    """Write the positions of each text's real tokens, in their order, and their number."""
    b = tl.program_id(0).to(tl.int64)
    size = tl.zeros((), dtype=tl.int32)
    for start in range(0, T, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = tl.load(mask + b * stride_b + at * stride_t, mask=at < T, other=0).to(tl.int32)
        rank = size + tl.cumsum(real, 0) - 1
        tl.store(order + b * T + rank, at.to(tl.int64), mask=real != 0)
        size += tl.sum(real, 0)
    tl.store(sizes + b, size)


@jit
def _mean(states, order, sizes, means, D, stride_b, stride_t, T, ROWS: constexpr, COLS: constexpr):
    b = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + b)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), dtype=means.dtype.element_ty)
    for start in range(0, size, ROWS):
        at = start + tl.arange(0, ROWS)
        token = tl.load(order + b * T + at, mask=at < size, other=0)
        inside = (at < size)[:, None] & (cols < D)[None, :]
        block = tl.load(states + b * stride_b + token[:, None] * stride_t + cols[None, :], mask=inside, other=0.0)
        total += tl.sum(block.to(total.dtype), 0)
    tl.store(means + b * D + cols, total / tl.maximum(size, 1), mask=cols < D)


@jit
def _tokens(states, means, token, real, start, D, stride_t, COLS: constexpr, CENTER: constexpr):
    """Load a block of columns of tokens, minus the mean; zero where they are padding."""
    cols = start + tl.arange(0, COLS)
    inside = real[:, None] & (cols < D)[None, :]
    block = tl.load(states + token[:, None] * stride_t + cols[None, :], mask=inside, other=0.0)
    block = block.to(means.dtype.element_ty)
    if CENTER:
        mean = tl.load(means + cols, mask=cols < D, other=0.0)
        block = tl.where(inside, block - mean[None, :], 0.0)
    return block


@jit
def _gram(
    states, order, sizes, means, gram, D, stride_b, stride_t, T, ROWS: constexpr, COLS: constexpr, CENTER: constexpr
):
    # One axis because the others end at 65535; the tiles of a text are neighbors and share the cache.
    tiles = tl.cdiv(T, ROWS)
    i, j = tl.program_id(0) // tiles % tiles, tl.program_id(0) % tiles
    b = (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    if j > i:
        return
    size = tl.load(sizes + b)
    at_i = i * ROWS + tl.arange(0, ROWS)
    at_j = j * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, ROWS), dtype=gram.dtype.element_ty)
    if i * ROWS < size:
        states += b * stride_b
        means += b * D
        token_i = tl.load(order + b * T + at_i, mask=at_i < size, other=0)
        token_j = tl.load(order + b * T + at_j, mask=at_j < size, other=0)
        # Three products on tensor cores are as exact as one in float32.
        if i == j:
            for start in range(0, D, COLS):
                x = _tokens(states, means, token_i, at_i < size, start, D, stride_t, COLS, CENTER)
                acc = tl.dot(x, tl.trans(x), acc, input_precision="tf32x3", out_dtype=acc.dtype)
        else:
            for start in range(0, D, COLS):
                x = _tokens(states, means, token_i, at_i < size, start, D, stride_t, COLS, CENTER)
                y = _tokens(states, means, token_j, at_j < size, start, D, stride_t, COLS, CENTER)
                acc = tl.dot(x, tl.trans(y), acc, input_precision="tf32x3", out_dtype=acc.dtype)
    gram += b * T * T
    inside = (at_i < T)[:, None] & (at_j < T)[None, :]
    tl.store(gram + at_i[:, None] * T + at_j[None, :], acc, mask=inside)
    if i != j:
        tl.store(gram + at_j[None, :] * T + at_i[:, None], acc, mask=inside)


@jit
def _factor(square, tiny, real, UNIT: constexpr):
    length = tl.sqrt(square)
    return tl.where(real & ~(length <= tiny), 1.0 / length if UNIT else 1.0, 0.0)  # True for NaN


@jit
def _scale(
    gram, squares, means, sizes, D, T, TINY, ROWS: constexpr, COLS: constexpr, CENTER: constexpr, UNIT: constexpr
):
    """Scale rows and columns as `prepared` scales tokens."""
    b = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + b)
    gram += b * T * T
    squares += b * T
    tiny = 0.0
    if CENTER:
        mean = tl.zeros((COLS,), dtype=means.dtype.element_ty)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            part = tl.load(means + b * D + cols, mask=cols < D, other=0.0)
            mean += part * part
        longest = tl.zeros((COLS,), dtype=means.dtype.element_ty)
        for start in range(0, size, COLS):
            cols = start + tl.arange(0, COLS)
            longest = tl.maximum(longest, tl.load(squares + cols, mask=cols < size, other=0.0))
        length = tl.sqrt(tl.sum(mean, 0))
        tiny = tl.where(length == 0, 0.0, TINY * (length + tl.sqrt(tl.max(longest, 0))))
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    left = _factor(tl.load(squares + rows, mask=rows < size, other=0.0), tiny, rows < size, UNIT)
    for start in range(0, T, COLS):
        cols = start + tl.arange(0, COLS)
        right = _factor(tl.load(squares + cols, mask=cols < size, other=0.0), tiny, cols < size, UNIT)
        at = gram + rows[:, None] * T + cols[None, :]
        inside = (rows < T)[:, None] & (cols < T)[None, :]
        tl.store(at, tl.load(at, mask=inside, other=0.0) * left[:, None] * right[None, :], mask=inside)


@jit
def _turn(states, order, sizes, apart, along, D, stride_b, stride_t, T, STEP, ROWS: constexpr, COLS: constexpr):
    b = tl.program_id(0).to(tl.int64)
    size = tl.load(sizes + b)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = at + 2 * STEP < size
    states += b * stride_b
    first = tl.load(order + b * T + at, mask=real, other=0)[:, None] * stride_t
    middle = tl.load(order + b * T + at + STEP, mask=real, other=0)[:, None] * stride_t
    last = tl.load(order + b * T + at + 2 * STEP, mask=real, other=0)[:, None] * stride_t
    # In float64 one pass is enough: 1 - cos is as accurate near 0 and pi as the difference of unit vectors.
    before = tl.zeros((ROWS,), dtype=tl.float64)
    after = tl.zeros((ROWS,), dtype=tl.float64)
    both = tl.zeros((ROWS,), dtype=tl.float64)
    for start in range(0, D, COLS):
        cols = (start + tl.arange(0, COLS))[None, :]
        inside = real[:, None] & (cols < D)
        here = tl.load(states + middle + cols, mask=inside, other=0.0).to(tl.float32)
        v = (here - tl.load(states + first + cols, mask=inside, other=0.0).to(tl.float32)).to(tl.float64)
        w = (tl.load(states + last + cols, mask=inside, other=0.0).to(tl.float32) - here).to(tl.float64)
        before += tl.sum(v * v, 1)
        after += tl.sum(w * w, 1)
        both += tl.sum(v * w, 1)
    has_angle = real & (before != 0) & (after != 0)
    cosine = both / tl.sqrt(tl.where(has_angle, before * after, 1.0))
    cosine = tl.where(cosine > 1, 1.0, tl.where(cosine < -1, -1.0, cosine))  # NaN stays NaN
    tl.store(apart + b * T + at, tl.where(has_angle, 2 - 2 * cosine, -1.0), mask=at < T)
    tl.store(along + b * T + at, tl.where(has_angle, 2 + 2 * cosine, -1.0), mask=at < T)


def prepared_gram(
    states: Tensor, mask: Tensor, *, center: bool, unit: bool, double: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the Gram matrices of texts' tokens, optionally centered and scaled, and the sizes of their corners.

    Args:
        states: shape ``(B, T, D)``, the last axis contiguous.
        mask: real tokens, shape ``(B, T)``.
        center: subtract the mean of the text's tokens.
        unit: scale tokens to length one, after centering.
        double: compute in float64, from a copy of the states in float32.

    Returns:
        Shapes ``(B, T, T)``, float32 or float64, zero beyond each text's tokens, and ``(B,)``, int32. In float32, off
        by at most about 1e-6 of the product of two tokens' lengths (5e-7 on an H200).
    """
    B, T, D = states.shape
    dtype = torch.float64 if double else torch.float32
    states = states.float() if double else states  # products in float64 of numbers of 16 bits fail in Triton 3.6
    means = torch.empty(B, D, dtype=dtype, device=states.device)
    gram = torch.empty(B, T, T, dtype=dtype, device=states.device)
    shape = D, states.stride(0), states.stride(1), T
    with torch.cuda.device_of(states):  # Triton launches on the current device, not on the tensors' device.
        order, sizes = _order(mask)
        if center:
            _mean[(B, triton.cdiv(D, 64))](states, order, sizes, means, *shape, ROWS=64, COLS=64, num_warps=2)
        tile = 64 if T <= 128 or double else 128
        _gram[(B * triton.cdiv(T, tile) ** 2,)](
            states, order, sizes, means, gram, *shape, ROWS=tile, CENTER=center, **_GRAM_OPTIONS[tile]
        )
        if center or unit:
            squares = gram.diagonal(dim1=1, dim2=2).contiguous()  # before `_scale` changes them in place
            tiny = 32 * torch.finfo(dtype).eps  # of tokens' lengths: a smaller difference is only rounding
            _scale[(B, triton.cdiv(T, 32))](
                gram, squares, means, sizes, D, T, tiny, ROWS=32, COLS=128, CENTER=center, UNIT=unit, num_warps=4
            )
    return gram, sizes


def turns(states: Tensor, mask: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return, for unit differences u and w that follow each other, the squared lengths of w - u and w + u.

    Args:
        states: shape ``(B, T, D)``, the last axis contiguous.
        mask: real tokens, shape ``(B, T)``.
        step: number of tokens that a difference spans.

    Returns:
        Both shape ``(B, T)``, float32; -1 where there is no pair of differences or one of them is zero.
    """
    B, T, D = states.shape
    apart, along = torch.empty(2, B, T, device=states.device)
    shape = D, states.stride(0), states.stride(1), T
    with torch.cuda.device_of(states):
        order, sizes = _order(mask)
        _turn[(B, triton.cdiv(T, 8))](states, order, sizes, apart, along, *shape, step, ROWS=8, COLS=128, num_warps=4)
    return apart, along


def _order(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the real tokens, shape ``(B, T)``, undefined after the last one, and their number."""
    B, T = mask.shape
    order = torch.empty(B, T, dtype=torch.int64, device=mask.device)
    sizes = torch.empty(B, dtype=torch.int32, device=mask.device)
    block = min(1024, max(32, triton.next_power_of_2(T)))
    _compact[(B,)](mask, order, sizes, *mask.stride(), T, BLOCK=block, num_warps=1)
    return order, sizes
