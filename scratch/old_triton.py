"""Eigenvalues of many small symmetric matrices of mixed size on a GPU, as Triton kernels in float32.

The classical algorithm, arranged for a chip that holds a small matrix in the registers of a few warps:

1. ``_begin`` copies each matrix, divided by its trace, into a padded scratch, and eliminates the row with the largest
   diagonal entry by a Householder reflection in float64.
2. Float32 reflections eliminate the last remaining row, again and again, until the matrix is tridiagonal. The rest is
   always the leading corner, so a matrix of any size joins the stage that fits it: ``_reduce_by_panels`` (matrix in
   memory, updates delayed and applied in blocks, like LAPACK's ``latrd``) reduces 512 to 256 and 256 to 128;
   ``_reduce_in_registers`` reduces 128 to 64, 64 to 32 and 32 to 1.
3. ``_bisect`` finds each eigenvalue independently by counting, with Sturm's sequence, the eigenvalues below a point.

Rounding errors are relative to the remaining matrix, so the dominant row goes first, in float64: the massive first
token of a language model, or a direction common to all tokens, would otherwise swamp the small eigenvalues.
"""
# Parameters of Triton kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

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

_SCRATCH_BYTES = 128 * 2**20
_PANEL = 16  # reflections delayed together; also the smallest inner dimension of `tl.dot`
# The fastest launch of each stage on an H200, by its initial rows. Few warps, because they synchronize at each step.
_PANEL_OPTIONS = {
    512: {"ROWS": 32, "TILE": 64, "num_warps": 8},
    256: {"ROWS": 16, "TILE": 32, "num_warps": 4},
    128: {"ROWS": 16, "TILE": 32, "num_warps": 2},
    64: {"ROWS": 16, "TILE": 32, "num_warps": 4},  # for the tests
}
_REGISTER_WARPS = {128: 4, 64: 1, 32: 1}


def jit(kernel: Any) -> Any:
    """Compile a kernel; without Triton, return it unchanged."""
    return kernel if triton is None else triton.jit(kernel)


@jit
def _reflection(row, cols, j):
    """Return v, its entry j - 1, beta and the squared off-diagonal: 1 - beta v v' reduces row[:j] to one entry."""
    tail = tl.where(cols < j, row, 0.0)
    square = tl.sum(tail * tail, 0)
    head = tl.sum(tl.where(cols == j - 1, row, 0.0), 0)
    beta = 0.0 * square
    norm = beta
    if square > 1e-30:  # below 1e-15 of the trace nothing is left to eliminate, and 1 / square would overflow
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
    v, _, beta, square = _reflection(row, cols, j)
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
        tl.store(work + (r + rows)[:, None] * N + cols[None, :], part.to(tl.float32))
    # Beyond the size, `_bisect` reads numbers that add no change of sign.
    tl.store(diagonal + b * N + cols, tl.where(cols == j, row, 2.0).to(tl.float32))
    tl.store(squares + b * N + cols, tl.where(cols == j, square, 0.0).to(tl.float32))
    tl.store(left + b, tl.maximum(j, tl.minimum(size, 1)))
    tl.store(totals + b, total.to(tl.float32))


@jit
def _reduce_by_panels(
    work,
    panel,
    left,
    diagonal,
    squares,
    STRIDE: constexpr,
    N: constexpr,
    LOW: constexpr,
    PANEL: constexpr,
    ROWS: constexpr,
    TILE: constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    top = tl.minimum(tl.load(left + b), N)
    matrix = work + b * STRIDE * STRIDE
    diagonal += b * STRIDE
    squares += b * STRIDE
    at_v = panel + b * 2 * PANEL * N
    at_w = at_v + PANEL * N
    cols = tl.arange(0, N)
    rows = tl.arange(0, ROWS)
    tile = tl.arange(0, TILE)
    ks = tl.arange(0, PANEL)
    while top > LOW:
        steps = tl.minimum(PANEL, top - LOW)
        V = tl.zeros((PANEL, N), tl.float32)
        W = tl.zeros((PANEL, N), tl.float32)
        for i in range(0, steps):
            j = top - 1 - i
            # The row with the delayed updates of this panel.
            row = tl.load(matrix + j * STRIDE + cols)
            v_j = tl.load(at_v + ks * N + j, mask=ks < i, other=0.0)
            w_j = tl.load(at_w + ks * N + j, mask=ks < i, other=0.0)
            row -= tl.sum(V * w_j[:, None] + W * v_j[:, None], 0)
            tl.store(diagonal + cols, row, mask=cols == j)
            v, _, beta, square = _reflection(row, cols, j)
            tl.store(squares + j, square)
            tl.store(at_v + i * N + cols, v)
            tl.debug_barrier()
            sums = tl.zeros((ROWS, N), tl.float32)
            # Whole cache lines: a mask that ends inside one makes every load a scalar. v is 0 from j on.
            loaded = (cols < (j + 31) // 32 * 32)[None, :]
            for r in range(0, j, ROWS):
                part = tl.load(matrix + (r + rows)[:, None] * STRIDE + cols[None, :], mask=loaded, other=0.0)
                sums += part * tl.load(at_v + i * N + r + rows)[:, None]
            from_v = tl.sum(V * v[None, :], 1)
            from_w = tl.sum(W * v[None, :], 1)
            y = beta * (tl.sum(sums, 0) - tl.sum(V * from_w[:, None] + W * from_v[:, None], 0))
            w = tl.where(cols < j, y - 0.5 * beta * tl.sum(v * y, 0) * v, 0.0)
            tl.store(at_w + i * N + cols, w)
            V = tl.where((ks == i)[:, None], v[None, :], V)
            W = tl.where((ks == i)[:, None], w[None, :], W)
            tl.debug_barrier()
        top -= steps
        live = (ks < steps)[:, None]
        for r in range(0, top, TILE):
            v_r = tl.trans(tl.load(at_v + ks[:, None] * N + (r + tile)[None, :], mask=live, other=0.0))
            w_r = tl.trans(tl.load(at_w + ks[:, None] * N + (r + tile)[None, :], mask=live, other=0.0))
            for c in range(0, top, TILE):
                v_c = tl.load(at_v + ks[:, None] * N + (c + tile)[None, :], mask=live, other=0.0)
                w_c = tl.load(at_w + ks[:, None] * N + (c + tile)[None, :], mask=live, other=0.0)
                at = matrix + (r + tile)[:, None] * STRIDE + (c + tile)[None, :]
                update = tl.dot(v_r, w_c, input_precision="ieee") + tl.dot(w_r, v_c, input_precision="ieee")
                tl.store(at, tl.load(at) - update)
        tl.debug_barrier()


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
            v, lead, beta, square = _reflection(row, cols, j)
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
    # the trace have the same relative precision. The odd ends keep midpoints off round numbers, where the sequence of a
    # matrix of round numbers is 0.
    FLOOR: tl.constexpr = 0x2E80A3D7
    low = tl.full((COUNT,), FLOOR, tl.int32)
    high = tl.full((COUNT,), 0x3F8147AE, tl.int32)  # 1.01
    if first < size:
        for _ in range(STEPS):
            middle = (low + high) >> 1
            x = middle.to(tl.float32, bitcast=True)
            before = tl.full((COUNT,), 0.0, tl.float32)
            last = tl.full((COUNT,), 1.0, tl.float32)
            below = tl.zeros((COUNT,), tl.int32)
            for i in range(0, size, UNROLL):
                for u in tl.static_range(UNROLL):
                    square = tl.maximum(tl.load(squares + i + u), 1e-25)
                    following = (tl.load(diagonal + i + u) - x) * last - square * before
                    before = last
                    last = following
                    below -= (last.to(tl.int32, bitcast=True) ^ before.to(tl.int32, bitcast=True)) >> 31
                    if u % 2 == 1:  # only signs matter: scale by a power of two against underflow
                        larger = tl.maximum(tl.abs(last), tl.abs(before)).to(tl.int32, bitcast=True)
                        scale = (0x7F000000 - (larger & 0x7F800000)).to(tl.float32, bitcast=True)
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
    eigenvalue = tl.where(low > FLOOR, ((low + high) >> 1).to(tl.float32, bitcast=True), 0.0)
    tl.store(out + b * n + ranks, tl.where(ranks < size, eigenvalue * total + nan, 0.0 * total), mask=ranks < n)


def eigenvalues_in_float32(matrices: Tensor, sizes: Tensor, *, register_rows: int | None = None) -> Tensor:
    """Return the eigenvalues of the leading corners in descending order; NaN for an invalid corner or size.

    Args:
        matrices: symmetric positive semi-definite, any float dtype, shape ``(B, n, n)`` with ``n <= MAX_SIZE``.
        sizes: rows of each corner, in ``[0, n]``, int32, shape ``(B,)``, on the same device.
        register_rows: matrices with more rows stay in memory; by default the fastest choice.

    Returns:
        Shape ``(B, n)``, float32, zero beyond ``sizes``.
    """
    batch, n, _ = matrices.shape
    values = torch.empty(batch, n, dtype=torch.float32, device=matrices.device)
    if values.numel() == 0:
        return values
    N = max(32, triton.next_power_of_2(n))
    if register_rows is None:
        # Many matrices of 128 rows are faster in memory because more of them fit on the chip than in registers: on an
        # H200, 0.96 instead of 1.20 microseconds each for 2048 in one launch.
        register_rows = 64 if N == 128 and batch >= 1024 else 128
    step = max(1, _SCRATCH_BYTES // (4 * N * N))
    with torch.cuda.device_of(matrices):  # Triton launches on the current device, not on the tensors' device.
        for start in range(0, batch, step):
            part = slice(start, start + step)
            _launch(matrices[part].contiguous(), sizes[part], values[part], N, register_rows)
    return values


def _launch(matrices: Tensor, sizes: Tensor, values: Tensor, N: int, register_rows: int) -> None:
    batch, n, _ = matrices.shape

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=matrices.device)

    work = scratch(batch, N, N)
    panel = scratch(batch, 2, _PANEL, N) if register_rows < N else work
    vectors = scratch(batch, 2, N, dtype=torch.float64)
    left = torch.empty_like(sizes)
    totals = scratch(batch)
    diagonal, squares = scratch(2, batch, N)
    _begin[(batch,)](
        matrices, work, vectors, sizes, left, totals, diagonal, squares, n, N=N, ROWS=8, num_warps=N // 64 or 1
    )
    size = N
    while size > register_rows:
        _reduce_by_panels[(batch,)](
            work, panel, left, diagonal, squares, STRIDE=N, N=size, LOW=size // 2, PANEL=_PANEL, **_PANEL_OPTIONS[size]
        )
        size //= 2
    while size > 1:
        low = size // 2 if size > 32 else 1
        _reduce_in_registers[(batch,)](
            work, left, diagonal, squares, STRIDE=N, N=size, LOW=low, num_warps=_REGISTER_WARPS[size]
        )
        size = low
    count = 32 if batch * n < 2**17 else min(128, N)
    _bisect[(batch, triton.cdiv(n, count))](
        diagonal, squares, sizes, totals, values, n, STRIDE=N, COUNT=count, STEPS=27, UNROLL=8, num_warps=1
    )
