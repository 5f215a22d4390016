"""Eigenvalue spectra of many small symmetric matrices at once.

On a GPU with Triton, matrices of up to 512 rows are solved by kernels, ``midlayer_encoders.extras.kernels.spectra``:
Householder tridiagonalization and Sturm bisection, for matrices of mixed sizes in one batch. Method ``"exact"`` is
float64, with errors like LAPACK's, and ``"fast"`` is float32. Elsewhere both are LAPACK (or cuSOLVER) in float64, with
equal sizes batched and several threads; so is ``"exact"`` on AMD's GPUs and with torch before 2.9.

The error of ``"fast"``, relative to float64 on the same float32 matrix, is at most ``1e-5`` nats for an entropy and
``1e-6`` of the trace for an eigenvalue. ``benchmarks/results/spectra_h200.md`` lists the measured errors (at most
``6e-6`` nats) and the times compared to ``torch.linalg.eigvalsh``.
"""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders._isolation import limit_cores
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.validation import check_choice

__all__ = ["METHODS", "Method", "eigenvalues", "kernels_enabled", "spectral_entropy", "without_kernels"]

#: ``"exact"``: float64. ``"fast"``: float32 on a GPU, else exact. ``"auto"``: fast if its error bound holds.
Method: TypeAlias = Literal["auto", "exact", "fast"]

METHODS: tuple[Method, ...] = get_args(Method)

#: Triton multiplies float64 matrices from 3.5 on, which came with torch 2.9, on tensor cores of NVIDIA's 8.0 or later.
KERNELS_IN_FLOAT64 = torch.version.hip is None and torch.__version__ >= "2.9"

_INLINE_WORK = 2**20  # sum of cubed sizes below which threads take longer than they save
# Without kernels, a GPU batches matrices of up to 32 rows and solves larger ones one by one (0.3 ms for 64 rows and 0.7
# for 128 on an H200), slower than one CPU core.
_FASTER_ON_CPU = range(33, 129)
_kernels_enabled: ContextVar[bool] = ContextVar("kernels_enabled", default=True)


def kernels_enabled() -> bool:
    """Return False inside :func:`without_kernels`, else True."""
    return _kernels_enabled.get()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Make ``"auto"`` and ``"exact"`` do without kernels inside: for work too small to be worth compiling them.

    The first use of the kernels on a machine compiles them, which takes seconds; Triton then caches them on disk.
    """
    token = _kernels_enabled.set(False)
    try:
        yield
    finally:
        _kernels_enabled.reset(token)


def eigenvalues(
    matrices: Tensor, sizes: Tensor | None = None, *, method: Method = "auto", check: bool = True
) -> Tensor:
    r"""Return the eigenvalues of symmetric positive semi-definite matrices, largest first, without gradients.

    Args:
        matrices: symmetric, any float dtype, shape ``(*, n, n)``.
        sizes: size of each matrix's valid leading corner, integers in ``[0, n]``, shape ``(*)``; the rest is ignored.
            ``None`` for all ``n``.
        method: ``"exact"`` (float64), ``"fast"`` (float32 on a GPU with Triton: error below ``1e-6`` of the trace for
            ``n <= 512``; larger matrices are exact) or ``"auto"``: fast on a GPU with Triton and exact elsewhere.
        check: wait for the device and raise an error if a result is NaN; with ``False`` NaN is returned, for callers
            that queue many calls and check their results once.

    Returns:
        Shape ``(*, n)``, float64, descending, at least ``0``, and ``0`` beyond ``sizes``.

    Raises:
        NotFiniteError: a matrix holds NaN or infinity.
        OptionError: invalid shapes, sizes or method.

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
    matrices: Tensor, sizes: Tensor | None = None, *, alpha: float = 1.0, method: Method = "auto", check: bool = True
) -> Tensor:
    r"""Return the Rényi entropy of each matrix's spectrum, in nats.

    .. math::
        S_\alpha(K) = \frac{1}{1-\alpha} \log \sum_i p_i^\alpha, \qquad p_i = \lambda_i(K) / \operatorname{tr}(K)

    with the limits :math:`S_1 = -\sum_i p_i \log p_i` and :math:`S_\infty = -\log \max_i p_i`. Gradients are not
    tracked.

    Args:
        matrices: symmetric positive semi-definite, any float dtype, shape ``(*, n, n)``.
        sizes: size of each matrix's valid leading corner, shape ``(*)``; ``None`` for all ``n``.
        alpha: order, ``> 0``; ``math.inf`` is allowed.
        method: as for :func:`eigenvalues`; ``"fast"`` is within ``1e-5`` nats for ``alpha >= 1``. Lower orders amplify
            rounding, so ``"auto"`` is exact for them.
        check: as for :func:`eigenvalues`.

    Returns:
        Shape ``(*)``, float64, between ``0`` and ``log(n)``; ``0`` for a matrix of zeros.

    Raises:
        NotFiniteError: a matrix holds NaN or infinity.
        OptionError: invalid shapes, sizes, order or method.

    Example:
        >>> spectral_entropy(torch.eye(4))
        tensor(1.3863, dtype=torch.float64)
        >>> spectral_entropy(torch.diag(torch.tensor([2.0, 1.0, 1.0])), alpha=2)
        tensor(0.9808, dtype=torch.float64)
    """
    if not alpha > 0:
        raise OptionError(f"`alpha` must be greater than 0 (1 = Shannon, math.inf = min-entropy), but got {alpha}.")
    flat, counts = _flat(matrices, sizes)
    values = _eigenvalues(flat, counts, "exact" if method == "auto" and alpha < 1 else method)
    entropy = _renyi_entropy(values, alpha)
    if check:
        _refuse_nan(entropy, counts, flat.shape[-1], matrices.shape[:-2])
    return entropy.reshape(matrices.shape[:-2])


def _renyi_entropy(values: Tensor, alpha: float) -> Tensor:
    total = values.sum(-1, keepdim=True)
    p: Tensor = values / total.clamp_min(1e-300)  # all p are 0 for a matrix of zeros
    if alpha < 1:  # a low power of rounding is not small
        p = p.masked_fill(values <= values[..., :1] * values.shape[-1] * torch.finfo(values.dtype).eps, 0)
    if alpha == 1:
        shannon: Tensor = torch.special.entr(p).sum(-1)
        return shannon.clamp_min_(0)
    # In logarithms because high powers of small p underflow.
    entropy = -p.amax(-1).log() if alpha == math.inf else torch.logsumexp(alpha * p.log(), -1) / (1 - alpha)
    return entropy.masked_fill(total.squeeze(-1) == 0, 0).clamp_min_(0)


def _eigenvalues(matrices: Tensor, counts: Tensor, method: Method) -> Tensor:
    """Return the eigenvalues, shape ``(B, n)``; NaN for an invalid matrix or size."""
    check_choice("method", method, METHODS)
    if method == "auto" and not kernels_enabled():
        return _exact(matrices.cpu(), counts.cpu()).to(matrices.device)
    double = method == "exact"
    on_gpu = matrices.is_cuda and (not double or (kernels_enabled() and KERNELS_IN_FLOAT64))
    if not (on_gpu or method == "fast") or not kernels_run_on(matrices, (8, 0) if double else (7, 0)):
        return _exact(matrices, counts)
    from midlayer_encoders.extras.kernels.spectra import MAX_SIZE, eigenvalues_by_kernels

    dtype = torch.float64 if double else torch.float32
    if matrices.shape[-1] <= MAX_SIZE:
        return eigenvalues_by_kernels(matrices, counts, dtype).double()
    # A few long texts among many: only large matrices are solved by the slow method.
    values = matrices.new_zeros(matrices.shape[:2], dtype=torch.float64)
    large = counts > MAX_SIZE
    values[large] = _exact(matrices[large], counts[large])
    small = matrices[~large, :MAX_SIZE, :MAX_SIZE]
    values[~large, :MAX_SIZE] = eigenvalues_by_kernels(small, counts[~large], dtype).double()
    return values


def _flat(matrices: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the matrices with one batch axis, and the size of each valid corner, on the same device."""
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
    """Raise an error unless all results are finite; this waits for the device and also detects invalid sizes."""
    finite = torch.isfinite(results)
    if finite.all():
        return
    invalid = (counts < 0) | (counts > n)
    if invalid.any():
        raise OptionError(f"`sizes` must be in [0, {n}], the rows of `matrices`, but got {int(counts[invalid][0])}.")
    index = torch.unravel_index((~finite).nonzero()[0, 0].cpu(), batch_shape) if batch_shape else ()
    name = f"`matrices[{', '.join(str(int(i)) for i in index)}]`" if index else "`matrices`"
    raise NotFiniteError(
        f"{name} must be finite, but holds NaN or infinity, or overflows float32: check the states behind it "
        "(float16 overflows at 65504, bfloat16 and float32 do not)."
    )


def kernels_run_on(tensor: Tensor, capability: tuple[int, int]) -> bool:
    """Return True if Triton kernels can run: on a GPU of this capability, or in Triton's interpreter on a CPU."""
    if not triton_is_installed():
        return False
    if tensor.is_cuda:
        return torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= capability
    return os.environ.get("TRITON_INTERPRET") == "1" and tensor.device.type == "cpu"


@cache
def triton_is_installed() -> bool:
    """Return True if Triton can be imported."""
    return find_spec("triton") is not None


@cache
def _threads(workers: int) -> ThreadPoolExecutor:
    """Return a permanent pool: each new thread would start another set of OpenMP threads."""
    return ThreadPoolExecutor(workers, thread_name_prefix="midlayer spectra", initializer=limit_cores)


if hasattr(os, "register_at_fork"):  # the threads of the parent process do not exist in a forked one
    os.register_at_fork(after_in_child=_threads.cache_clear)


def _exact(matrices: Tensor, counts: Tensor) -> Tensor:
    """Return float64 eigenvalues, computed per size so that no work is spent on padding."""
    n = matrices.shape[-1]
    if matrices.is_cuda and n in _FASTER_ON_CPU:
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
        # LAPACK fails or hangs on NaN.
        finite = torch.isfinite(corners).all(-1).all(-1)
        spectra: Tensor = torch.linalg.eigvalsh(corners.where(finite[:, None, None], 0)).flip(-1).clamp_min(0)
        return spectra.where(finite[:, None], math.nan)

    # LAPACK solves one small matrix at a time on one core; torch releases the GIL meanwhile.
    if workers > 1 and sum(size**3 for size in counts.tolist()) > _INLINE_WORK:
        solved = list(_threads(workers).map(solve, *zip(*parts, strict=True)))
    else:
        solved = [solve(size, part) for size, part in parts]
    for (_, part), spectra in zip(parts, solved, strict=True):
        values[part, : spectra.shape[-1]] = spectra
    return values
