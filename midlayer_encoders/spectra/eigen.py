"""Eigenvalue spectra of many small symmetric matrices at once: the only place that finds eigenvalues.

Two methods. ``"exact"`` is LAPACK (or cuSOLVER) in float64, equal sizes together, on the CPU with several threads.
``"fast"`` is a set of Triton kernels (:mod:`midlayer_encoders.spectra._triton`) for up to 512 rows on a GPU:
Householder tridiagonalization and Sturm bisection in float32, matrices of mixed size side by side.

The bound of ``"fast"``: an entropy is within ``1e-5`` nats of the float64 one of the same matrix in float32, and an
eigenvalue within ``1e-6`` of the trace. ``benchmarks/results/spectra_h200.md`` holds the errors measured (at most
``6e-6`` nats, on spectra of many kinds) and the times beside those of ``torch.linalg.eigvalsh``.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.validation import check_choice

Method: TypeAlias = Literal["auto", "exact", "fast"]
"""``"exact"``: float64. ``"fast"``: float32 on a GPU, else exact. ``"auto"``: fast where its error bound holds."""

METHODS: tuple[Method, ...] = get_args(Method)

_INLINE_WORK = 2**20  # sum of rows cubed under which handing it to threads takes longer than the work
# A GPU takes up to 32 rows in batches; larger ones one after the other, 0.3 ms for 64 rows and 0.7 for 128 on an H200,
# where a single core of a CPU takes less.
_BETTER_ON_CPU = range(33, 129)
_turn = threading.Lock()
_wanted: ContextVar[bool] = ContextVar("kernels_wanted", default=True)


def kernels_wanted() -> bool:
    """Return whether Triton's kernels may be used here: outside of :func:`without_kernels`."""
    return _wanted.get()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Take ``"auto"`` for ``"exact"`` inside, on the CPU: for so little work that the kernels would not pay.

    The first use of the kernels on a machine compiles them, which takes seconds; Triton keeps them on disk after that.
    """
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


def eigenvalues(
    matrices: Tensor, sizes: Tensor | None = None, *, method: Method = "auto", check: bool = True
) -> Tensor:
    r"""Return the eigenvalues of symmetric positive semi-definite matrices, largest first.

    No gradient is kept.

    Args:
        matrices: symmetric, any float dtype, shape ``(*, n, n)``.
        sizes: how many leading rows and columns of each matrix count, integers in ``[0, n]``, shape ``(*)``; what lies
            outside that corner is ignored. ``None`` for all ``n``.
        method: ``"exact"``, ``"fast"`` (error under ``1e-6`` of the trace, for ``n <= 512``; larger ones are exact) or
            ``"auto"``, which is fast where there is a GPU with Triton, and exact elsewhere.
        check: whether to wait for the device and raise where the result is NaN; ``False`` leaves NaN there, for a
            caller that queues many calls and checks their results once.

    Returns:
        Shape ``(*, n)``, float64, descending, at least ``0``, and ``0`` beyond ``sizes``.

    Raises:
        NotFiniteError: a matrix holds NaN or infinity.
        OptionError: shapes, sizes or method that cannot be.

    Example:
        >>> eigenvalues(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        tensor([3., 1.], dtype=torch.float64)
        >>> eigenvalues(torch.eye(3).expand(2, 3, 3), sizes=torch.tensor([2, 3]))
        tensor([[1., 1., 0.],
                [1., 1., 1.]], dtype=torch.float64)
    """
    flat, counts = _flat(matrices, sizes)
    values = _eigenvalues(flat, counts, method)
    if check:
        _refuse_nan(values.sum(-1), counts, flat.shape[-1], matrices.shape[:-2])
    return values.reshape(matrices.shape[:-1])


def spectral_entropy(
    matrices: Tensor,
    sizes: Tensor | None = None,
    *,
    alpha: float = 1.0,
    method: Method = "auto",
    check: bool = True,
) -> Tensor:
    r"""Return the Rényi entropy of each matrix's spectrum, in nats.

    .. math::
        S_\alpha(K) = \frac{1}{1-\alpha} \log \sum_i p_i^\alpha, \qquad p_i = \lambda_i(K) / \operatorname{tr}(K)

    with the limits :math:`S_1 = -\sum_i p_i \log p_i` and :math:`S_\infty = -\log \max_i p_i`. The order 2 finds no
    eigenvalues: :math:`S_2 = -\log (\lVert K \rVert_F^2 / \operatorname{tr}(K)^2)`. No gradient is kept.

    Args:
        matrices: symmetric positive semi-definite, any float dtype, shape ``(*, n, n)``.
        sizes: how many leading rows and columns of each matrix count, shape ``(*)``; ``None`` for all ``n``.
        alpha: order, ``> 0``; ``math.inf`` is allowed.
        method: as for :func:`eigenvalues`; ``"fast"`` is within ``1e-5`` nats for ``alpha >= 1``. A lower order makes
            rounding noise count, so that ``"auto"`` is then exact.
        check: as for :func:`eigenvalues`.

    Returns:
        Shape ``(*)``, float64, between ``0`` and ``log(n)``. A matrix of zeros gives ``0``: a set of zero vectors is
        one point, as is a set of equal ones.

    Raises:
        NotFiniteError: a matrix holds NaN or infinity.
        OptionError: shapes, sizes, order or method that cannot be.

    Example:
        >>> spectral_entropy(torch.eye(4))
        tensor(1.3863, dtype=torch.float64)
        >>> spectral_entropy(torch.diag(torch.tensor([2.0, 1.0, 1.0])), alpha=2)
        tensor(0.9808, dtype=torch.float64)
    """
    if not alpha > 0:
        raise OptionError(f"`alpha` must be greater than 0 (1 = Shannon, math.inf = min-entropy), but got {alpha}.")
    flat, counts = _flat(matrices, sizes)
    if alpha == 2:
        check_choice("method", method, METHODS)
        entropy = _collision_entropy(flat, counts if sizes is not None else None)
    else:
        values = _eigenvalues(flat, counts, "exact" if method == "auto" and alpha < 1 else method)
        entropy = _renyi_entropy(values, alpha)
    if check:
        _refuse_nan(entropy, counts, flat.shape[-1], matrices.shape[:-2])
    return entropy.reshape(matrices.shape[:-2])


def _renyi_entropy(values: Tensor, alpha: float) -> Tensor:
    total = values.sum(-1, keepdim=True)
    p: Tensor = values / total.clamp_min(1e-300)  # All p are 0 where there is nothing.
    if alpha < 1:  # A low power of an eigenvalue that is only rounding is not small.
        p = p.masked_fill(values <= values[..., :1] * values.shape[-1] * torch.finfo(values.dtype).eps, 0)
    if alpha == 1:
        shannon: Tensor = torch.special.entr(p).sum(-1)
        return shannon.clamp_min_(0)
    # In logarithms, since a high power of a small p is 0.
    entropy = -p.amax(-1).log() if alpha == math.inf else torch.logsumexp(alpha * p.log(), -1) / (1 - alpha)
    return entropy.masked_fill(total.squeeze(-1) == 0, 0).clamp_min_(0)


def _collision_entropy(matrices: Tensor, counts: Tensor | None) -> Tensor:
    if counts is not None:
        inside = torch.arange(matrices.shape[-1], device=matrices.device) < counts[:, None]
        matrices = matrices.where(inside[:, :, None] & inside[:, None, :], 0)
        wrong = (counts < 0) | (counts > matrices.shape[-1])
        matrices = matrices.masked_fill(wrong[:, None, None], math.nan)
    total = matrices.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float64)
    entropy: Tensor = -2 * (norm / total).log()
    # `0 * norm`, since an infinite norm must not end as an entropy of 0.
    return entropy.masked_fill_(norm == 0, 0).clamp_min_(0).add_(0 * norm)


def _eigenvalues(matrices: Tensor, counts: Tensor, method: Method) -> Tensor:
    """Return the eigenvalues, shape ``(B, n)``, NaN where a matrix or a size cannot be."""
    check_choice("method", method, METHODS)
    if method == "auto" and not kernels_wanted():
        return _exact(matrices.cpu(), counts.cpu()).to(matrices.device)
    if method == "exact" or not _kernels_run(matrices, asked=method == "fast"):
        return _exact(matrices, counts)
    from midlayer_encoders.spectra._triton import MAX_SIZE, eigenvalues_in_float32

    if matrices.shape[-1] <= MAX_SIZE:
        return eigenvalues_in_float32(matrices, counts).double()
    # One long text among many: only what is too large goes the slow way.
    values = matrices.new_zeros(matrices.shape[:2], dtype=torch.float64)
    large = counts > MAX_SIZE
    values[large] = _exact(matrices[large], counts[large])
    small = matrices[~large, :MAX_SIZE, :MAX_SIZE]
    values[~large, :MAX_SIZE] = eigenvalues_in_float32(small, counts[~large]).double()
    return values


def _flat(matrices: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the matrices with one batch axis, and how many rows of each count, on the same device."""
    if matrices.ndim < 2 or matrices.shape[-1] != matrices.shape[-2] or matrices.shape[-1] == 0:
        raise OptionError(f"`matrices` must have the shape (*, n, n) with n >= 1, but got {tuple(matrices.shape)}.")
    if not matrices.is_floating_point():
        raise OptionError(f"`matrices` must be real floating point, but got {matrices.dtype}: call `.float()` on them.")
    n = matrices.shape[-1]
    flat = matrices.detach().reshape(-1, n, n)
    if sizes is None:
        return flat, torch.full((len(flat),), n, dtype=torch.int32, device=flat.device)
    if sizes.shape != matrices.shape[:-2] or sizes.is_floating_point() or sizes.dtype == torch.bool:
        raise OptionError(
            f"`sizes` must be integers, one for each matrix, of shape {tuple(matrices.shape[:-2])}, "
            f"but got {sizes.dtype} of shape {tuple(sizes.shape)}."
        )
    return flat, sizes.reshape(-1).to(flat.device, torch.int32)


def _refuse_nan(results: Tensor, counts: Tensor, n: int, batch_shape: torch.Size) -> None:
    """Raise unless all results are finite: the only wait for the device, which also finds wrong sizes."""
    finite = torch.isfinite(results)
    if finite.all():
        return
    wrong = (counts < 0) | (counts > n)
    if wrong.any():
        raise OptionError(f"`sizes` must be in [0, {n}], the rows of `matrices`, but got {int(counts[wrong][0])}.")
    index = torch.unravel_index((~finite).nonzero()[0, 0].cpu(), batch_shape) if batch_shape else ()
    name = f"`matrices[{', '.join(str(int(i)) for i in index)}]`" if index else "`matrices`"
    raise NotFiniteError(
        f"{name} must be finite, but holds NaN or infinity, or overflows float32: check the states it was made from "
        "(float16 ends at 65504, bfloat16 and float32 do not)."
    )


def _kernels_run(matrices: Tensor, *, asked: bool) -> bool:
    """Return whether the Triton kernels can run here; on the CPU only when asked for, in Triton's interpreter."""
    if not _triton_is_here():
        return False
    if matrices.is_cuda:
        return torch.version.hip is not None or torch.cuda.get_device_capability(matrices.device) >= (7, 0)
    return asked and os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _triton_is_here() -> bool:
    return find_spec("triton") is not None


@cache
def _threads(workers: int) -> ThreadPoolExecutor:
    """Return threads that stay: a new one would start as many more for OpenMP as torch has."""
    return ThreadPoolExecutor(workers, thread_name_prefix="midlayer spectra", initializer=_keep_to_one_core)


def _keep_to_one_core() -> None:
    """Have this thread start no others.

    Those of OpenMP wait for work, spinning: with 16 cores, and so 16 threads of 16, the decompositions of one layer
    took five times as long as with one. The limit is the thread's own, so that nothing changes for the rest of the
    process, as it does by ``torch.set_num_threads``. It is set once, since that takes as long as a few decompositions.
    """
    torch.get_num_threads()  # takes over torch's number, where it is new to this thread, which would end the limit
    _libraries().limit(limits=1, user_api="openmp")


@cache
def _libraries() -> Any:
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController()


def _start_anew() -> None:
    """Forget the threads of the parent process, which are not in this one."""
    global _turn
    _turn = threading.Lock()
    _threads.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def _exact(matrices: Tensor, counts: Tensor) -> Tensor:
    """Return float64 eigenvalues, each size by itself, so that no work is spent on padding."""
    n = matrices.shape[-1]
    if matrices.is_cuda and n in _BETTER_ON_CPU:
        return _exact(matrices.cpu(), counts.cpu()).to(matrices.device)
    values = matrices.new_zeros(matrices.shape[:2], dtype=torch.float64)
    groups: dict[int, list[int]] = {}
    for index, size in enumerate(counts.tolist()):
        groups.setdefault(size, []).append(index)
    workers = 1 if matrices.is_cuda else torch.get_num_threads()
    parts = [
        (size, part)
        for size, members in sorted(groups.items(), reverse=True)
        for part in torch.tensor(members, device=matrices.device).chunk(workers)
    ]

    def solve(size: int, part: Tensor) -> Tensor:
        if not 0 <= size <= n:
            return values.new_full((len(part), n), math.nan)
        corners = matrices[part, :size, :size].double()
        # LAPACK fails, or does not return, on NaN.
        finite = torch.isfinite(corners).all(-1).all(-1)
        found: Tensor = torch.linalg.eigvalsh(corners.where(finite[:, None, None], 0)).flip(-1).clamp_min(0)
        return found.where(finite[:, None], math.nan)

    # LAPACK takes one small matrix at a time and one core for it; torch lets go of the interpreter meanwhile.
    if workers > 1 and sum(size**3 for size in counts.tolist()) > _INLINE_WORK:
        with _turn:  # or two callers would start two sets of threads, and every thread look for the libraries
            pool = _threads(workers)
            _libraries()
        solved = list(pool.map(solve, *zip(*parts, strict=True)))
    else:
        solved = [solve(size, part) for size, part in parts]
    for (_, part), found in zip(parts, solved, strict=True):
        values[part, : found.shape[-1]] = found
    return values
