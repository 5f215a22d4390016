"""Gram matrices of texts' tokens and of sets of rows, and the precision in which they are computed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from midlayer_encoders.spectra.eigen import kernels_enabled, triton_is_installed


def single_or_better(states: Tensor) -> Tensor:
    """Return states in float32, or unchanged if they are float64: enough for reading one token at a time."""
    return states.to(result_dtype(states))


def precise(states: Tensor) -> Tensor:
    """Return states in float64 on a CPU, where it costs little more, and in float32 or better elsewhere."""
    double = states.device.type == "cpu" or states.dtype == torch.float64
    return states.to(torch.float64 if double else torch.float32)


def result_dtype(states: Tensor) -> torch.dtype:
    """Return float64 for float64 states and float32 for all others."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast and TF32 for the products inside."""
    before = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean length of each row of ``(*, N, D)``, shape ``(*, N)``."""
    result: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return result


def unit_rows(rows: Tensor) -> Tensor:
    """Scale each row of ``(*, N, D)`` to length one; a zero row stays zero, NaN stays NaN."""
    length = lengths(rows).unsqueeze(-1)
    return rows / torch.where(length == 0, 1.0, length)


def kernels_can_read(states: Tensor) -> bool:
    """Return True if the Triton kernels can read these states: on an NVIDIA GPU with TF32, or in the interpreter."""
    readable = states.ndim == 3 and states.stride(-1) == 1 and states.dtype != torch.float64 and states.numel() > 0
    if not readable or not kernels_enabled() or not triton_is_installed():
        return False
    if states.is_cuda:
        return _has_tf32(states.device)
    return os.environ.get("TRITON_INTERPRET") == "1" and states.device.type == "cpu"


@cache
def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def prepared(states: Tensor, mask: Tensor | None, *, center: bool, unit: bool) -> Tensor:
    """Return rows in working precision with padding set to zero, optionally centered and scaled to unit length.

    A row that differs from the mean only by rounding becomes zero: scaled up, repeated rows would be noise.

    Args:
        states: shape ``(*, N, D)``.
        mask: real rows, shape ``(*, N)``; ``None`` for all.
        center: subtract the mean of the real rows.
        unit: scale rows to length one, after centering.

    Returns:
        Shape ``(*, N, D)``.
    """
    rows, mean = _centered(states, mask, center)
    if not center and not unit:
        return rows
    return rows * _scale(lengths(rows), lengths(mean), mask, unit).unsqueeze(-1)


def token_gram(states: Tensor, mask: Tensor, *, center: bool, unit: bool) -> tuple[Tensor, Tensor | None]:
    """Return the :func:`smaller_gram` of each text's :func:`prepared` tokens, and the size of its valid corner.

    Args:
        states: shape ``(*, T, D)``.
        mask: real tokens, shape ``(*, T)``; they are moved to the front.
        center: subtract the mean of the text's tokens.
        unit: scale tokens to length one, after centering.

    Returns:
        Matrices of shape ``(*, n, n)`` with ``n = min(T, D)``, and the sizes of their leading corners, shape ``(*)``,
        or ``None`` if the whole matrix is valid.
    """
    if states.shape[-2] > states.shape[-1]:
        return smaller_gram(prepared(states, mask, center=center, unit=unit)), None
    if kernels_can_read(states):
        from midlayer_encoders.metrics._token_triton import prepared_gram

        return prepared_gram(states, mask, center=center, unit=unit)
    states, mask = tokens_first(states, mask)
    rows, mean = _centered(states, mask, center)
    gram = smaller_gram(rows)
    if center or unit:
        # The squared lengths are on the diagonal, and scaling T x T numbers is faster than T x D.
        scale = _scale(gram.diagonal(dim1=-2, dim2=-1).sqrt(), lengths(mean), mask, unit)
        gram = gram.mul_(scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))
    return gram, mask.sum(dim=-1)


def _centered(states: Tensor, mask: Tensor | None, center: bool) -> tuple[Tensor, Tensor]:
    """Return rows in working precision, zero or minus the mean where padded, and the mean, ``(*, 1, D)``."""
    rows = states if mask is None else torch.where(mask.unsqueeze(-1), states, 0.0)
    if not center:
        return precise(rows), precise(torch.zeros_like(rows[..., :1, :]))
    count = rows.shape[-2] if mask is None else mask.sum(dim=-1).clamp(min=1)[..., None, None]
    mean = rows.sum(dim=-2, keepdim=True, dtype=precise(rows[..., :0, :]).dtype) / count
    return rows - mean, mean


def _scale(length: Tensor, mean_length: Tensor, mask: Tensor | None, unit: bool) -> Tensor:
    """Return the factor of each row, shape ``(*, N)``: 0 for padding and for rows that are only rounding."""
    real = torch.ones_like(length, dtype=torch.bool) if mask is None else mask
    longest = torch.where(real, length, 0.0).amax(dim=-1, keepdim=True)
    tiny = torch.where(mean_length == 0, 0.0, 32 * torch.finfo(length.dtype).eps * (mean_length + longest))
    nonzero = real & ~(length <= tiny)  # True for NaN
    return torch.where(nonzero, 1.0 / length if unit else 1.0, 0.0)


def products(first: Tensor, second: Tensor) -> Tensor:
    """Return the products of all rows of ``(*, N, D)`` and ``(*, M, D)``, shape ``(*, N, M)``."""
    with full_precision(first.device):
        return first @ second.mT


def smaller_gram(rows: Tensor) -> Tensor:
    """Return ``rows rows'`` or ``rows' rows`` of ``(*, N, D)``, whichever is smaller: ``(*, min(N, D), min(N, D))``."""
    rows = rows if rows.shape[-2] <= rows.shape[-1] else rows.mT
    return products(rows, rows)


def tokens_first(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``(*, T, D)`` and their mask with the real tokens of each text first, in their order."""
    # Checking for this common case is cheap on a CPU; on a GPU it would wait for the device.
    if mask.device.type == "cpu" and not (mask[..., 1:] & ~mask[..., :-1]).any():
        return states, mask
    order = torch.argsort(~mask, dim=-1, stable=True)
    return states.take_along_dim(order.unsqueeze(-1), dim=-2), mask.take_along_dim(order, dim=-1)
