"""Eigenvalues of many small symmetric matrices of mixed size on a GPU, as Triton kernels in float32 or float64.

The classical algorithm, arranged for a chip that holds a small matrix in the registers of a few warps:

1. ``_begin`` copies each matrix, divided by its trace, into a padded scratch, and eliminates the row with the largest
   diagonal entry by a Householder reflection in float64.
2. Reflections in the precision of the result eliminate the last remaining row, again and again, until the matrix is
   tridiagonal. The rest is always the leading corner, so a matrix of any size joins the stage that fits it. Up to 128
   rows, ``_reduce_in_registers`` does this from 128 to 64, 64 to 32 and 32 to 1. It would read a larger matrix once per
   row; ``_reduce_to_band`` reads it once per 16 rows and leaves a band, with most of the work in matrix products, and
   ``_chase`` makes the band tridiagonal.
3. ``_bisect`` finds each eigenvalue independently by counting, with Sturm's sequence, the eigenvalues below a point.

Rounding errors are relative to the remaining matrix, so the dominant row goes first, in float64: the massive first
token of a language model, or a direction common to all tokens, would otherwise swamp the small eigenvalues. Products in
float64 run on tensor cores as well, where ``tf32x3`` has no meaning.
"""
# Parameters of Triton kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # pytest can still collect the module.
    triton = tl = constexpr = None


#: Largest number of rows that the kernels support.
MAX_SIZE = 512

_SCRATCH_NUMBERS = 2**26  # almost two matrices of 512 rows for each multiprocessor of an H200
_WIDTH = 16  # of the band; also the smallest inner dimension of `tl.dot`
# The fastest launch of each stage on an H200, by its initial rows.
_BAND_OPTIONS = {  # rows and columns of a tile, warps and stages of the pipeline
    torch.float32: {512: (64, 64, 4, 3), 256: (32, 32, 2, 1), 128: (32, 32, 2, 1)},
    torch.float64: {512: (64, 32, 8, 2), 256: (64, 32, 4, 1), 128: (32, 32, 2, 1)},
}
_CHASE_OPTIONS = {  # lanes and warps
    torch.float32: {512: (16, 8), 256: (16, 4), 128: (8, 1)},
    torch.float64: {512: (16, 8), 256: (16, 4), 128: (8, 1)},
}
_REGISTER_WARPS = {torch.float32: {128: 4, 64: 1, 32: 1}, torch.float64: {128: 8, 64: 4, 32: 1}}


def jit(kernel: Any, *, general: Sequence[str] = ()) -> Any:
    """Compile a kernel, once for all values of the ``general`` arguments; without Triton, return it unchanged."""
    return kernel if triton is None else triton.jit(kernel, do_not_specialize=general)


@jit
def _reflection(row, cols, j, dtype: constexpr):
    """Return v, its entry j - 1, beta and the squared off-diagonal: 1 - beta v v' reduces row[:j] to one entry."""
    tail = tl.where(cols < j, row, 0.0)
    square = tl.sum(tail * tail, 0)
    head = tl.sum(tl.where(cols == j - 1, row, 0.0), 0)
    beta = 0.0 * square
    norm = beta
    if square > (1e-30 if dtype == tl.float32 else 1e-40):  # else only rounding is left, and 1 / square may overflow
        norm = tl.sqrt(square)
        beta = 1.0 / (norm * (norm + tl.abs(head)))
    lead = head + tl.where(head < 0, -norm, norm)
    return tl.where(cols == j - 1, lead, tail), lead, beta, norm * norm


@jit
def _begin(source, work, vectors, sizes, left, totals, diagonal, squares, n, N: constexpr, ROWS: constexpr):
    b = tl.program_id(0).to(tl.int64)
    given_size = tl.load(sizes + b)
    size = tl.minimum(given_size, n)
    source += b * n * n
    work += b * N * N
    at_v = vectors + b * 2 * N
    at_w = at_v + N
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, N)
    entries = tl.load(source + cols * (n + 1), mask=cols < size, other=0.0).to(tl.float64)
    total = tl.sum(entries, 0)
    # An invalid size gives NaN, like a NaN in the matrix: the caller checks once, at the end.
    total = tl.where((given_size < 0) | (given_size > n), float("nan"), total)
    # `0 * total` and not `0`, so that NaN stays NaN.
    scale = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0 * total)
    # Swap the row with the largest diagonal entry and the last one, j.
    j = size - 1
    largest = tl.argmax(entries, 0)
    at_cols = tl.where(cols == j, largest, tl.where(cols == largest, j, cols))
    row = tl.load(source + largest * n + at_cols, mask=cols < size, other=0.0).to(tl.float64) * scale
    v, _, beta, square = _reflection(row, cols, j, work.dtype.element_ty)
    tl.store(at_v + cols, v)
    tl.debug_barrier()
    sums = tl.zeros((ROWS, N), tl.float64)
    for r in range(0, size, ROWS):
        at_rows = tl.where(r + rows == j, largest, tl.where(r + rows == largest, j, r + rows))
        inside = (r + rows < size)[:, None] & (cols < size)[None, :]
        part = tl.load(source + at_rows[:, None] * n + at_cols[None, :], mask=inside, other=0.0)
        sums += part.to(tl.float64) * tl.load(at_v + r + rows)[:, None]
    y = tl.sum(sums, 0) * scale * beta
    w = tl.where(cols < j, y - 0.5 * beta * tl.sum(v * y, 0) * v, 0.0)
    tl.store(at_w + cols, w)
    tl.debug_barrier()
    for r in range(0, N, ROWS):
        at_rows = tl.where(r + rows == j, largest, tl.where(r + rows == largest, j, r + rows))
        inside = (r + rows < size)[:, None] & (cols < size)[None, :]
        part = tl.load(source + at_rows[:, None] * n + at_cols[None, :], mask=inside, other=0.0)
        v_r = tl.load(at_v + r + rows)[:, None]
        w_r = tl.load(at_w + r + rows)[:, None]
        part = part.to(tl.float64) * scale - v_r * w[None, :] - w_r * v[None, :]
        tl.store(work + (r + rows)[:, None] * N + cols[None, :], part)
    # Beyond the size, `_bisect` reads numbers that add no change of sign.
    tl.store(diagonal + b * N + cols, tl.where(cols == j, row, 2.0))
    tl.store(squares + b * N + cols, tl.where(cols == j, square, 0.0))
    tl.store(left + b, tl.maximum(j, tl.minimum(size, 1)))
    tl.store(totals + b, total)


@jit
def _reduce_to_band(
    work, panel, band, left, STRIDE: constexpr, N: constexpr, WIDTH: constexpr, ROWS: constexpr, COLS: constexpr
):
    """Reduce the rows from N to LOW to WIDTH entries left of the diagonal, WIDTH rows at a time."""
    LOW: tl.constexpr = N // 2 if N > 128 else 0
    dtype: tl.constexpr = work.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    size = tl.load(left + b)
    top = tl.minimum(size, N)
    matrix = work + b * STRIDE * STRIDE
    band += b * STRIDE * 2 * WIDTH
    # V and W of the last panel, whose update of the matrix is delayed, and V, U and U A of this one.
    at_pair = panel + b * 5 * WIDTH * STRIDE
    at_v = at_pair + 2 * WIDTH * STRIDE
    at_u = at_v + WIDTH * STRIDE
    at_y = at_u + WIDTH * STRIDE
    ks = tl.arange(0, WIDTH)
    pairs = tl.arange(0, 2 * WIDTH)[:, None] * STRIDE
    swapped = (tl.arange(0, 2 * WIDTH)[:, None] + WIDTH) % (2 * WIDTH) * STRIDE
    cols = tl.arange(0, N)
    tile_r = tl.arange(0, ROWS)
    tile_c = tl.arange(0, COLS)
    delayed = size > N  # by the launch for 2 N
    while top > LOW:
        steps = tl.minimum(WIDTH, top - LOW)
        at_rows = top - 1 - ks
        live = ks < steps
        if delayed:
            left_rows = tl.trans(tl.load(at_pair + swapped + at_rows[None, :], mask=live[None, :], other=0.0))
            for c in range(0, top, COLS):
                at = matrix + at_rows[:, None] * STRIDE + (c + tile_c)[None, :]
                update = tl.dot(left_rows, tl.load(at_pair + pairs + (c + tile_c)[None, :]), input_precision="tf32x3")
                tl.store(at, tl.load(at, mask=live[:, None], other=0.0) - update, mask=live[:, None])
            tl.debug_barrier()
        # Each reflection replaces its row of the panel; their product is 1 - sum of u v'.
        V = tl.load(matrix + at_rows[:, None] * STRIDE + cols[None, :], mask=live[:, None], other=0.0)
        U = tl.zeros((WIDTH, N), dtype)
        for i in range(0, steps):
            row_index = top - 1 - i
            pivot = row_index - WIDTH
            row = tl.sum(tl.where((ks == i)[:, None], V, 0.0), 0)
            v, lead, beta, square = _reflection(row, cols, pivot + 1, dtype)
            norm = tl.sqrt(square)
            reduced = tl.where(cols == pivot, tl.where(lead < 0, norm, -norm), tl.where(cols > pivot, row, 0.0))
            in_band = (cols <= row_index) & (cols > row_index - 2 * WIDTH)
            tl.store(band + (size - 1 - row_index) * 2 * WIDTH + row_index - cols, reduced, mask=in_band)
            products = tl.sum(V * v[None, :], 1)
            V -= tl.where(ks > i, beta * products, 0.0)[:, None] * v[None, :]
            u = beta * (v - tl.sum(U * tl.where(ks < i, products, 0.0)[:, None], 0))
            V = tl.where((ks == i)[:, None], v[None, :], V)
            U = tl.where((ks == i)[:, None], u[None, :], U)
        top -= steps
        tl.store(at_v + ks[:, None] * STRIDE + cols[None, :], V)
        tl.store(at_u + ks[:, None] * STRIDE + cols[None, :], U)
        tl.debug_barrier()
        # One pass over the matrix: the delayed update and the product with U. Sums of the tiles in float64 halve the
        # error.
        S = tl.zeros((WIDTH, WIDTH), tl.float64)
        for r in range(0, top, ROWS):
            left_rows = tl.trans(tl.load(at_pair + swapped + (r + tile_r)[None, :], mask=delayed, other=0.0))
            sums = tl.zeros((ROWS, WIDTH), tl.float64)
            for c in range(0, top, COLS):
                at = matrix + (r + tile_r)[:, None] * STRIDE + (c + tile_c)[None, :]
                right = tl.load(at_pair + pairs + (c + tile_c)[None, :], mask=delayed, other=0.0)
                part = tl.load(at) - tl.dot(left_rows, right, input_precision="tf32x3")
                tl.store(at, part)
                u_c = tl.load(at_u + ks[:, None] * STRIDE + (c + tile_c)[None, :])
                sums += tl.dot(part, tl.trans(u_c), input_precision="tf32x3").to(tl.float64)
            Y = sums.to(dtype)
            tl.store(at_y + ks[None, :] * STRIDE + (r + tile_r)[:, None], Y)
            u_r = tl.load(at_u + ks[:, None] * STRIDE + (r + tile_r)[None, :])
            S += tl.dot(u_r, Y, input_precision="tf32x3").to(tl.float64)
        tl.debug_barrier()
        for c in range(0, top, COLS):
            at = ks[:, None] * STRIDE + (c + tile_c)[None, :]
            v_c = tl.load(at_v + at)
            w_c = tl.load(at_y + at) - 0.5 * tl.dot(S.to(dtype), v_c, input_precision="tf32x3")
            tl.store(at_pair + at, v_c)
            tl.store(at_pair + WIDTH * STRIDE + at, tl.where((c + tile_c < top)[None, :], w_c, 0.0))
        delayed = top > 0
        tl.debug_barrier()


@jit
def _spread(x):
    """Return a number of each slot with the axes of its blocks."""
    return x[:, None, None, None]


@jit
def _chase(band, left, diagonal, squares, STRIDE: constexpr, N: constexpr, WIDTH: constexpr, LANES: constexpr):
    """Reduce the band to a tridiagonal matrix, from N rows left to LOW.

    ``band[x, d]`` is the entry of column x and row x + d, counted from the last row of the matrix, the first to be
    eliminated. Sweep s eliminates column s by a reflection of WIDTH rows, which fills a block below the band; the next
    reflection eliminates the first column of this block, and so on to the end of the matrix. Sweep s + 1 can follow two
    reflections behind sweep s, so the reflections of SLOTS sweeps are applied together.
    """
    LOW: tl.constexpr = N // 2 if N > 128 else 0
    dtype: tl.constexpr = band.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    SLOTS: tl.constexpr = N // (2 * WIDTH)
    PARTS: tl.constexpr = WIDTH // LANES
    n = tl.load(left + b)
    band += b * STRIDE * 2 * WIDTH
    first = tl.maximum(n - N, 0)
    end = tl.maximum(n - tl.maximum(LOW, 2), first)
    period = tl.maximum(2 * SLOTS, (n - first - 2) // WIDTH + 2)
    final = tl.maximum(end - first - 1, 0)
    ticks = final // SLOTS * period + final % SLOTS * 2 + (n - 1 - end) // WIDTH + 2
    # Axes: slots, columns of a block, and two axes of its rows, so that a few lanes of a warp hold a block.
    slot = tl.arange(0, SLOTS)
    j = tl.arange(0, WIDTH)[None, :, None, None]
    rows = tl.arange(0, PARTS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
    i = rows[:, None, :, :]
    v = tl.zeros((SLOTS, PARTS, LANES), dtype)
    beta = tl.zeros((SLOTS,), dtype)
    for tick in range(0, tl.where(end > first, ticks, 0)):
        since = tick - 2 * slot
        turn = tl.maximum(since, 0) // period
        step = since - turn * period - 1
        sweep = first + turn * SLOTS + slot
        active = (since >= 0) & (sweep < end)
        row = sweep + 1 + step * WIDTH
        col = tl.where(step < 0, sweep, row)
        below = row + WIDTH
        # The lower triangle of the block on the diagonal, and the block below it. The first step of a sweep has only a
        # column below the diagonal. Constants are added last: they become part of the instruction.
        at_block = band + _spread(row * 2 * WIDTH) + i + j * (2 * WIDTH - 1)
        at_below = band + _spread(col * 2 * WIDTH + below - col) + i + j * (2 * WIDTH - 1)
        inside = (i >= j) & (i < _spread(tl.where(active & (step >= 0), n - row, 0)))
        inside_below = (i < _spread(tl.where(active, n - below, 0))) & (j < _spread(tl.where(step < 0, 1, WIDTH)))
        block = tl.load(at_block, mask=inside, other=0.0)
        lower = tl.load(at_below, mask=inside_below, other=0.0)
        v_i = v[:, None, :, :]
        v_j = tl.reshape(v, (SLOTS, WIDTH))[:, :, None, None]
        beta_rows = beta[:, None, None]
        from_above = tl.sum(tl.sum(tl.where(i > j, block * v_i, 0.0), 2), 2)
        y = beta_rows * (tl.sum(block * v_j, 1) + tl.reshape(from_above, (SLOTS, PARTS, LANES)))
        w = y - 0.5 * beta_rows * tl.sum(tl.sum(v * y, 1), 1)[:, None, None] * v
        block -= v_i * tl.reshape(w, (SLOTS, WIDTH))[:, :, None, None] + w[:, None, :, :] * v_j
        tl.store(at_block, block, mask=inside)
        # The block below from the right, then its first column is eliminated from the left.
        lower -= (beta_rows * tl.sum(lower * v_j, 1))[:, None, :, :] * v_j
        column = tl.sum(tl.where(j == 0, lower, 0.0), 1)
        square = tl.sum(tl.sum(column * column, 1), 1)
        head = tl.sum(tl.sum(tl.where(rows == 0, column, 0.0), 1), 1)
        large = square > (1e-30 if dtype == tl.float32 else 1e-40)
        norm = tl.where(large, tl.sqrt(square), 0.0 * square)
        beta = tl.where(large, 1.0 / tl.where(large, norm * (norm + tl.abs(head)), 1.0), 0.0 * square)
        norm = tl.where(head < 0, -norm, norm)
        v = tl.where(rows == 0, (head + norm)[:, None, None], column)
        v_i = v[:, None, :, :]
        products = beta[:, None] * tl.sum(tl.sum(lower * v_i, 2), 2)
        reduced = tl.where(i == 0, -_spread(norm), 0.0)
        tl.store(at_below, tl.where(j == 0, reduced, lower - v_i * products[:, :, None, None]), mask=inside_below)
        tl.debug_barrier()
    if LOW == 0:
        for start in range(0, n, 32):
            x = start + tl.arange(0, 32)
            tl.store(diagonal + b * STRIDE + n - 1 - x, tl.load(band + x * 2 * WIDTH, mask=x < n), mask=x < n)
            beside = tl.load(band + x * 2 * WIDTH + 1, mask=x < n - 1)
            tl.store(squares + b * STRIDE + n - 1 - x, beside * beside, mask=x < n - 1)


@jit
def _reduce_in_registers(work, left, diagonal, squares, STRIDE: constexpr, N: constexpr, LOW: constexpr):
    b = tl.program_id(0).to(tl.int64)
    size = tl.minimum(tl.load(left + b), N)
    work += b * STRIDE * STRIDE
    diagonal += b * STRIDE
    squares += b * STRIDE
    rows = tl.arange(0, N)
    cols = tl.arange(0, N)
    if size >= LOW:
        matrix = tl.load(work + rows[:, None] * STRIDE + cols[None, :])
        row = tl.load(work + (size - 1) * STRIDE + cols)
        for step in range(0, size - LOW):
            j = size - 1 - step
            tl.store(diagonal + cols, row, mask=cols == j)
            v, lead, beta, square = _reflection(row, cols, j, work.dtype.element_ty)
            tl.store(squares + j, square)
            y = tl.sum(matrix * v[:, None], 0) * beta
            # Row j - 1, before and then after the update: the next step starts with it.
            row = tl.sum(matrix * tl.where(rows == j - 1, 1.0, 0.0)[:, None], 0)
            y_lead = tl.sum(tl.where(cols == j - 1, y, 0.0), 0)
            half = 0.5 * beta * tl.sum(v * y, 0)
            w = tl.where(cols < j, y - half * v, 0.0)
            matrix -= v[:, None] * w[None, :] + w[:, None] * v[None, :]
            row -= lead * w + (y_lead - half * lead) * v
        if LOW > 1:
            inside = (rows < LOW)[:, None] & (cols < LOW)[None, :]
            tl.store(work + rows[:, None] * STRIDE + cols[None, :], matrix, mask=inside)
        else:
            tl.store(diagonal + cols, row, mask=cols < 1)


@jit
def _bisect(
    diagonal, squares, sizes, totals, out, n, STRIDE: constexpr, COUNT: constexpr, STEPS: constexpr, UNROLL: constexpr
):
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COUNT
    size = tl.minimum(tl.load(sizes + b), n)
    ranks = first + tl.arange(0, COUNT)
    diagonal += b * STRIDE
    squares += b * STRIDE
    # Bits of floats have the order of the floats, so bisecting bits bisects the logarithm: eigenvalues above 2^-34 of
    # the trace (2^-56 in float64) have the same relative precision. The odd ends keep midpoints off round numbers,
    # where the sequence of a matrix of round numbers is 0.
    dtype: tl.constexpr = diagonal.dtype.element_ty
    SINGLE: tl.constexpr = dtype == tl.float32
    BITS: tl.constexpr = tl.int32 if SINGLE else tl.int64
    FLOOR: tl.constexpr = 0x2E80A3D7 if SINGLE else 0x3C70147AE147AE15
    EXPONENT: tl.constexpr = 0x7F800000 if SINGLE else 0x7FF0000000000000
    LARGEST: tl.constexpr = 0x7F000000 if SINGLE else 0x7FE0000000000000
    RESCALE: tl.constexpr = 2 if SINGLE else 4
    low = tl.full((COUNT,), FLOOR, BITS)
    high = tl.full((COUNT,), 1.01, dtype).to(BITS, bitcast=True)
    if first < size:
        for _ in range(STEPS):
            middle = (low + high) >> 1
            x = middle.to(dtype, bitcast=True)
            before = tl.full((COUNT,), 0.0, dtype)
            last = tl.full((COUNT,), 1.0, dtype)
            below = tl.zeros((COUNT,), tl.int32)
            for i in range(0, size, UNROLL):
                for u in tl.static_range(UNROLL):
                    square = tl.maximum(tl.load(squares + i + u), 1e-25 if SINGLE else 1e-40)
                    following = (tl.load(diagonal + i + u) - x) * last - square * before
                    before = last
                    last = following
                    change = last.to(BITS, bitcast=True) ^ before.to(BITS, bitcast=True)
                    below -= (change >> (31 if SINGLE else 63)).to(tl.int32)
                    if (u + 1) % RESCALE == 0:  # only signs matter: scale by a power of two against underflow
                        larger = tl.maximum(tl.abs(last), tl.abs(before)).to(BITS, bitcast=True)
                        scale = (LARGEST - (larger & EXPONENT)).to(dtype, bitcast=True)
                        last *= scale
                        before *= scale
            above = below <= size - 1 - ranks
            low = tl.where(above, middle, low)
            high = tl.where(above, high, middle)
    # Counting hides NaN: add it again.
    total = tl.load(totals + b)
    nan = 0.0 * total
    for i in range(0, size):
        nan += 0.0 * (tl.load(diagonal + i) + tl.load(squares + i))
    eigenvalue = tl.where(low > FLOOR, ((low + high) >> 1).to(dtype, bitcast=True), 0.0)
    tl.store(out + b * n + ranks, tl.where(ranks < size, eigenvalue * total + nan, 0.0 * total), mask=ranks < n)


def eigenvalues_by_kernels(matrices: Tensor, sizes: Tensor, dtype: torch.dtype, *, register_rows: int = 128) -> Tensor:
    """Return the eigenvalues of the leading corners in descending order; NaN for an invalid corner or size.

    Args:
        matrices: symmetric positive semi-definite, any float dtype, shape ``(B, n, n)`` with ``n <= MAX_SIZE``.
        sizes: rows of each corner, in ``[0, n]``, int32, shape ``(B,)``, on the same device.
        dtype: float32, or float64 for errors of a few roundings of float64, relative to the largest eigenvalue.
        register_rows: matrices with more rows stay in memory.

    Returns:
        Shape ``(B, n)``, ``dtype``, zero beyond ``sizes``.
    """
    batch, n, _ = matrices.shape
    values = torch.empty(batch, n, dtype=dtype, device=matrices.device)
    if values.numel() == 0:
        return values
    N = max(32, triton.next_power_of_2(n))
    step = max(1, _SCRATCH_NUMBERS // (N * N))
    with torch.cuda.device_of(matrices):  # Triton launches on the current device, not on the tensors' device.
        for start in range(0, batch, step):
            part = slice(start, start + step)
            _launch(matrices[part].contiguous(), sizes[part], values[part], N, register_rows)
    return values


def _launch(matrices: Tensor, sizes: Tensor, values: Tensor, N: int, register_rows: int) -> None:
    batch, n, _ = matrices.shape

    def scratch(*shape: int, dtype: torch.dtype = values.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=matrices.device)

    work = scratch(batch, N, N)
    vectors = scratch(batch, 2, N, dtype=torch.float64)
    left = torch.empty_like(sizes)
    totals = scratch(batch)
    diagonal, squares = scratch(2, batch, N)
    _begin[(batch,)](
        matrices, work, vectors, sizes, left, totals, diagonal, squares, n, N=N, ROWS=8, num_warps=N // 64 or 1
    )
    if register_rows < N:
        panel = scratch(batch, 5, _WIDTH, N)
        band = scratch(batch, N, 2 * _WIDTH)
        options = _BAND_OPTIONS[values.dtype]
        starts = [size for size in options if size == N or 128 <= size < N]
        for size in starts:
            *tile, warps, pipeline = options[size]
            _reduce_to_band[(batch,)](
                work, panel, band, left, N, size, _WIDTH, *tile, num_warps=warps, num_stages=pipeline
            )
        for size in starts:
            lanes, warps = _CHASE_OPTIONS[values.dtype][size]
            _chase[(batch,)](band, left, diagonal, squares, N, size, _WIDTH, lanes, num_warps=warps)
    else:
        size = N
        while size > 1:
            low = size // 2 if size > 32 else 1
            warps = _REGISTER_WARPS[values.dtype][size]
            _reduce_in_registers[(batch,)](work, left, diagonal, squares, N, size, low, num_warps=warps)
            size = low
    count = 32 if batch * n < 2**17 else min(128, N)
    steps = 27 if values.dtype == torch.float32 else 56  # leave brackets of a few roundings
    _bisect[(batch, triton.cdiv(n, count))](
        diagonal, squares, sizes, totals, values, n, STRIDE=N, COUNT=count, STEPS=steps, UNROLL=8, num_warps=1
    )
